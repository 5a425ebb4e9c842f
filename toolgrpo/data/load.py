"""`load_tasks`: one line of text into a dataset.

arithmetic                        the embedded tasks (also: embedded)
chains                            the harder ones: four calls each
gsm8k, mbpp, aime                 from the hub, by their usual ids
gsm8k:PATH, mbpp:PATH, aime:PATH  the original format from a local file or folder
data.jsonl, .json, .parquet, .csv rows with `prompt` and `answer`
FOLDER                            one file per split: train.jsonl, test.jsonl, ...
reasoning_gym:NAME[:SIZE[:SEED]]  generated problems
mixture.yaml                      several of these, with weights, tools and rewards (toolgrpo/data/mixture.py)
OWNER/NAME[:CONFIG]               any other data set of the hub with `prompt` and `answer`
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset

from toolgrpo.data.files import READERS
from toolgrpo.data.mixture import Mixture, is_mixture
from toolgrpo.data.rows import Convert, OnBadRow, RawRow, Row, good_rows, raise_bad_row, with_opening
from toolgrpo.data.sources import FORMATS, EmbeddedTasks, FileRows, GymTasks, HubPlace, HubRows, Source
from toolgrpo.data.table import write_rows
from toolgrpo.errors import DataError
from toolgrpo.named_files import located

_GYM_SIZE = 1000
_EMBEDDED = {"arithmetic": "arithmetic", "embedded": "arithmetic", "chains": "chains"}


def load_tasks(
    spec: str | Path,
    *,
    split: str = "train",
    limit: int | None = None,
    on_bad_row: OnBadRow = raise_bad_row,
    seed: int = 0,
    system_prompt: str | None = None,
) -> Dataset:
    """Load the rows of `spec` (see the module), at most `limit` of them.

    `seed` orders a mixture; `system_prompt` is the text of a system message for rows that have
    none.
    """
    if limit is not None and limit < 1:
        raise DataError(f"the limit of rows must be at least 1, got {limit}")
    if is_mixture(spec):
        mixture = Mixture.from_file(located(spec))
        rows = partial(mixture.rows, partial(task_rows, split=split), limit=limit, seed=seed)
    else:
        rows = partial(_limited_rows, str(spec), split, limit)

    def again(first: bool) -> Iterator[Row]:
        for row in rows(on_bad_row=on_bad_row if first else _ignore):
            yield with_opening(row, system_prompt)

    dataset = write_rows(again)
    if dataset is None:
        raise DataError(f"{spec} [{split}] has no rows that can be used")
    return dataset


def task_rows(
    spec: str, *, split: str, limit: int | None = None, on_bad_row: OnBadRow = raise_bad_row
) -> Iterator[Row]:
    """Yield the checked rows of anything but a mixture."""
    source, convert = _resolve(spec, split, limit)
    return good_rows(source.rows(), convert, on_bad_row)


def source_rows(spec: str, split: str) -> Iterator[RawRow]:
    """Yield the rows of a file, a folder or the hub as they are there."""
    yield from _resolve(spec, split, None).source.rows()


def _limited_rows(spec: str, split: str, limit: int | None, on_bad_row: OnBadRow) -> Iterator[Row]:
    return islice(task_rows(spec, split=split, limit=limit, on_bad_row=on_bad_row), limit)


class _Resolved(NamedTuple):
    source: Source
    convert: Convert


def _resolve(spec: str, split: str, limit: int | None) -> _Resolved:
    name, colon, rest = spec.partition(":")
    if spec in _EMBEDDED:
        return _Resolved(EmbeddedTasks(_EMBEDDED[spec], split, limit), dict)
    if name in FORMATS and not Path(spec).exists():
        format_ = FORMATS[name]
        if colon and not rest:
            raise DataError(f"{spec!r} names no file; write {name}:PATH for local rows, or {name} for those of the hub")
        if colon:
            return _Resolved(FileRows(located(rest), split), format_.convert)
        if split not in format_.splits:
            raise DataError(f"{name} has the splits {', '.join(format_.splits)}, got {split!r}")
        return _Resolved(HubRows(format_.splits[split]), format_.convert)
    if name == "reasoning_gym":
        return _Resolved(_gym(rest, split), dict)
    path = located(spec)
    if path.exists() or path.suffix.lower() in READERS:
        return _Resolved(FileRows(path, split), dict)
    if spec.count("/") == 1 and not spec.startswith((".", "/", "~")):
        return _Resolved(HubRows(HubPlace(name, rest or None, split)), dict)
    raise DataError(
        f"there is no data named {spec!r}: no such file, and it is none of {', '.join((*_EMBEDDED, *FORMATS))}, "
        f"reasoning_gym:NAME, or OWNER/NAME on the hub"
    )


def _gym(rest: str, split: str) -> GymTasks:
    name, _, numbers = rest.partition(":")
    size, _, seed = numbers.partition(":")
    if not name or not (size or "1").isdecimal() or not (seed or "0").isdecimal() or size == "0":
        raise DataError(f"write reasoning_gym:NAME[:SIZE[:SEED]], e.g. reasoning_gym:gsm_symbolic:500:1; got {rest!r}")
    return GymTasks(name, int(size or _GYM_SIZE), int(seed or 0), split)


def _ignore(error: DataError) -> None:
    """Ignore a bad row: it was reported the first time through."""
