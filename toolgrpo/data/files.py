"""Rows from files: JSONL, JSON, Parquet, CSV, and the Arrow files of `Dataset.save_to_disk`.

Each reader yields every row with the place where it stands, and never raises for a row: what cannot
be read comes as a `RawRow` with a problem. JSONL, CSV, Parquet and Arrow are streamed, so memory stays
flat; a JSON file is read as a whole.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from toolgrpo.data.rows import RawRow, of_cells, unfilled
from toolgrpo.errors import DataError
from toolgrpo.support.settings_files import unrepeated
from toolgrpo.support.shipped_files import no_data_file

MAX_LINE_BYTES = 4 << 20
_BATCH = 1000


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """Read one JSON object per line; empty lines are passed over."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                size = len(line) + _skip_line(file, line)
                yield RawRow(
                    where, None, f"the line has {size:,} bytes; no row of text needs more than {MAX_LINE_BYTES:,}"
                )
            elif line.strip():
                yield _json_row(where, line)


def read_json(path: Path) -> Iterator[RawRow]:
    """Read a list of JSON objects."""
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=unrepeated)
    except (ValueError, RecursionError) as error:
        hint = " (one object per line is called .jsonl)" if getattr(error, "msg", "") == "Extra data" else ""
        where = error if isinstance(error, json.JSONDecodeError) else _problem(error)
        raise DataError(f"{path} is not valid JSON: {where}{hint}") from error
    if not isinstance(content, list):
        raise DataError(f"{path} must hold a list of rows, but it is a {type(content).__name__}")
    for number, row in enumerate(content, start=1):
        yield _object_row(f"{path}, item {number}", row)


def read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow.parquet  # not for the other kinds, which are read before anything heavy is imported

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(f"{path}", file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{path}, row {number}", unfilled(row))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from error


def read_arrow(path: Path) -> Iterator[RawRow]:
    """Read an Arrow stream, as the library `datasets` writes it."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            _check_names(f"{path}", stream.schema.names)
            rows = (row for batch in stream for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield RawRow(f"{path}, row {number}", unfilled(row))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not an Arrow stream: {error}") from error


def read_csv(path: Path) -> Iterator[RawRow]:
    """Read a first line of column names, then one row per line (or several lines, in quotes)."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))  # the default refuses 131,073 characters
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or ()
            _check_names(f"{path}, line 1", names)
            if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
                raise DataError(f"{path}, line 1: the one column is {names[0]!r}; columns are separated by commas")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    yield RawRow(where, None, f"it does not have the {len(names)} cells that the first line names")
                else:
                    yield RawRow(where, of_cells(row))
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {_line_that_is_no_text(path)}: it is not UTF-8 text") from None
        except csv.Error as error:
            raise DataError(f"{path}, after line {reader.line_num}: not valid CSV: {error}") from error


def _line_that_is_no_text(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                return number
    return 1


READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".arrow": read_arrow,
}


def file_rows(path: Path, split: str) -> Iterator[RawRow]:
    """Yield the rows of a file, or of the files of one split in a folder; each is read by the kind that its name ends with."""
    files = [path]
    if path.is_dir():
        files = find_files(path, split)
    elif not path.exists():
        raise DataError(no_data_file(path))
    elif split not in ("train", "all"):
        raise DataError(
            f"{path} is one file and has no split {split!r}. For held-out rows hold some of it out "
            f"(--eval_share 0.1), give another file (--eval_dataset_id_or_path FILE), or a folder that has a file for "
            f"each split"
        )
    for file in files:
        kind = file.suffix.lower()
        if kind not in READERS:
            raise DataError(
                f"{file}: files of this kind are not supported; use {', '.join(READERS)} (or .yaml for a mixture)"
            )
        try:
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty (0 bytes)")
            if kind not in (".parquet", ".arrow"):
                _check_text_file(file)
            yield from READERS[kind](file)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def find_files(folder: Path, split: str) -> list[Path]:
    """Find the files of one split in a folder.

    That is what `save_to_disk` wrote, or else `train.jsonl` alone, or else `train-00000-of-00002.parquet` and so on, or else the one whose name begins so.
    """
    if saved := _saved(folder, split):
        return saved
    # not those of runs that were written below the rows that they were trained on
    runs = {file.parent for file in folder.rglob("run.yaml")} - {folder}
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in READERS and file.is_file()]
    files = [file for file in files if runs.isdisjoint(file.parents)]
    if not files:
        raise DataError(f"the folder {folder} holds no data files ({', '.join(READERS)})")
    named = [file for file in files if file.stem == split]
    parts = [
        file
        for file in files
        if re.fullmatch(rf"{re.escape(split)}[-_]\d+([-_]of[-_]\d+(-[0-9a-f]{{16}})?)?", file.stem)
    ]
    begin_so = [file for file in files if file.stem.startswith((f"{split}-", f"{split}_"))]
    chosen = named or parts or begin_so
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
        raise DataError(
            f"the folder {folder} has no split {split!r} (a file {split}.jsonl, for example); it holds {names}"
        )
    within = sorted({str(file.parent.relative_to(folder)) for file in chosen})
    if len(within) > 1:  # a clone of a hub repository with several configurations, say
        raise DataError(
            f"the folder {folder} has the split {split!r} more than once, in {', '.join(within)}; give one of these folders"
        )
    kinds = {file.suffix.lower() for file in chosen}
    if len(chosen) > 1 and (chosen != parts or len(kinds) > 1):
        names = ", ".join(file.name for file in chosen)
        raise DataError(f"the folder {folder} has several files for the split {split!r}: {names}; give the path of one")
    return chosen


def _saved(folder: Path, split: str) -> list[Path]:
    """Return the files of a split of a `DatasetDict`, or those of a `Dataset`, that `save_to_disk` wrote."""
    places = [folder / split, *([folder] if split == "train" else [])]
    saved = next((place for place in places if (place / "state.json").is_file()), None)
    if saved is None:
        return []
    try:  # other arrow files are caches of `map` beside them, or of an earlier, longer save
        return [saved / one["filename"] for one in json.loads((saved / "state.json").read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{saved / 'state.json'} does not list the files of its rows ({type(error).__name__}: {error})"
        ) from error


def _json_row(where: str, line: bytes) -> RawRow:
    try:
        return _object_row(where, json.loads(line.decode("utf-8-sig"), object_pairs_hook=unrepeated))
    except UnicodeDecodeError as error:
        return RawRow(where, None, f"it is not UTF-8 text (byte {error.start})")
    except (ValueError, RecursionError) as error:
        return RawRow(where, None, f"it is not valid JSON: {_problem(error)}")


def _problem(error: Exception) -> str:
    """Return what keeps a text from being JSON that can be used, in a few words."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if "integer string conversion" in str(error):
        return f"it holds an integer of more than {sys.get_int_max_str_digits()} digits; write it as text"
    return str(error)


def _check_names(where: str, columns: Sequence[str]) -> None:
    for place, name in enumerate(columns):
        if name in columns[:place]:
            raise DataError(f"{where}: two columns have the name {name!r}; rename one, or leave it out")


def _object_row(where: str, row: Any) -> RawRow:
    if not isinstance(row, dict):
        return RawRow(where, None, f"a row must be an object with named columns, but this is a {type(row).__name__}")
    return RawRow(where, row)


def _skip_line(file: IO[bytes], line: bytes) -> int:
    """Read on to the end of an overlong line; return how many bytes that took."""
    skipped = 0
    while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
        skipped += len(line)
    return skipped


def _check_text_file(path: Path) -> None:
    with path.open("rb") as file:
        if b"\0" in file.read(4096):
            raise DataError(f"{path} is a binary file, not text; Parquet files must be named .parquet")
