"""Rows into a `datasets.Dataset` on disk, in flat memory, with their values as they were.

The rows are gone through twice: once to learn the kind of each column, once to write them. A column
whose values do not fit one kind (numbers here, text there, objects of different keys) is kept as
JSON, so every row gives back what it had; Arrow alone would fill in keys or turn numbers into text.
Not covered: `datasets` reads floating-point numbers inside JSON columns with an error of up to a
few units of the last binary digit, and cannot read integers there that need more than 64 bits,
which is an error here; write those as text.

The Arrow file lies in a temporary folder of the process and goes with it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, Features, Json, List, Value

from toolgrpo.data.rows import (
    NoPromptColumn,
    RawRow,
    Row,
    fault_of_prompt,
    good_rows,
    prompt_advice,
    row_key,
    rows_and_reasons,
)
from toolgrpo.errors import DataError
from toolgrpo.support.storage import storage_errors

_BATCH = 1000
_LONG_INTEGER = re.compile(r"\d{19}")
_MESSAGE_KEYS = {"role", "content"}

FEATURES: dict[str, Any] = {
    "null": Value("null"),
    "bool": Value("bool"),
    "int": Value("int64"),
    "float": Value("float64"),
    "text": Value("string"),
    "ints": List(Value("int64")),
    "floats": List(Value("float64")),
    "texts": List(Value("string")),
    "messages": List({"role": Value("string"), "content": Value("string")}),
    "json": Json(),
}
_SCALARS = {bool: "bool", int: "int", float: "float", str: "text"}
_LISTS = {int: "ints", float: "floats", str: "texts"}


def write_rows(rows: Callable[[bool], Iterable[Row]]) -> Dataset | None:
    """Write a dataset of the rows; None if there are none.

    `rows(first)` gives them anew; `first` is True the first time.
    """
    kinds: dict[str, str] = {}
    first, second = iter(rows(True)), iter(rows(False))
    while batch := list(islice(first, _BATCH)):
        for column in dict.fromkeys(key for row in batch for key in row):
            kinds[column] = _widen(kinds.get(column, "null"), _kind([row.get(column) for row in batch]))
    if not kinds:
        return None
    schema = Features({column: FEATURES[kind] for column, kind in kinds.items()}).arrow_schema  # made at each look
    types = dict(zip(kinds, schema.types, strict=True))
    path = _new_file()
    with (
        storage_errors(f"the rows of the dataset, which are kept in {path},", path.parent),
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as writer,
    ):
        while batch := list(islice(second, _BATCH)):
            arrays = [_array([row.get(column) for row in batch], kind, types[column]) for column, kind in kinds.items()]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
    return Dataset.from_file(str(path))


def _kind(values: list[Any]) -> str:
    kind = "null"
    for value in values:
        kind = _widen(kind, _kind_of(value))
        if kind == "json":
            break
    return kind


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return "json"
    if type(value) in _SCALARS:
        return _SCALARS[type(value)]
    if isinstance(value, list) and value:
        inner = {type(item) for item in value}
        if len(inner) == 1 and (only := inner.pop()) in _LISTS:
            return _LISTS[only] if only is not int or all(-(2**63) <= item < 2**63 for item in value) else "json"
        if all(isinstance(item, dict) and item.keys() == _MESSAGE_KEYS and _all_text(item) for item in value):
            return "messages"
    return "json"


def _all_text(item: dict[str, Any]) -> bool:
    return all(isinstance(value, str) for value in item.values())


def _widen(one: str, other: str) -> str:
    if one == other or other == "null":
        return one
    return other if one == "null" else "json"


def _array(values: list[Any], kind: str, arrow_type: pyarrow.DataType) -> pyarrow.Array:
    if kind != "json":
        return pyarrow.array(values, type=arrow_type)
    texts = [None if value is None else _json(value) for value in values]
    return pyarrow.ExtensionArray.from_storage(arrow_type, pyarrow.array(texts, type=pyarrow.string()))


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    if _LONG_INTEGER.search(text):  # or text that looks like one: ask the reader itself
        try:
            Json().decode_example(text)
        except ValueError as error:
            raise DataError(f"a column holds {text[:80]}, an integer of more than 64 bits; write it as text") from error
    return text


def _new_file() -> Path:
    folder = tempfile.mkdtemp(prefix="toolgrpo-rows-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder) / "rows.arrow"


# Rows that are given as a list of dicts, as scripts and notebooks have them, made into a dataset.
#
# They are checked as those of a file are: a prompt is text or messages, an answer text or a number.


def as_dataset(rows: Any, name: str) -> Any:
    """Return a list or tuple of rows as a dataset; whatever else is given, as it is."""
    if not isinstance(rows, list | tuple):
        return rows
    dataset = write_rows(lambda first: _checked(rows, name))
    if dataset is None:
        raise DataError(f"{name} is an empty list; give at least one row, a dict with a `prompt`")
    return dataset


def _checked(rows: list[Any] | tuple[Any, ...], name: str) -> Iterator[Row]:
    raw = (
        RawRow(f"{name}[{place}]", _plain(row))
        if isinstance(row, Mapping)
        else RawRow(f"{name}[{place}]", None, f"a row must be a dict with named columns, but this is {row!r:.60}")
        for place, row in enumerate(rows)
    )
    return good_rows(raw, dict, _raise)


def _plain(value: Any) -> Any:
    """Return a value with the numbers and arrays of numpy and torch in it as Python's own."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _raise(error: DataError) -> None:
    raise error


def check_prompts(rows: Any, name: str) -> None:
    """Raise DataError for a table that somebody else made and that has a prompt no episode can begin with."""
    if "prompt" not in rows.column_names:
        columns = rows[0] if len(rows) else {}
        raise NoPromptColumn(f"{name} has no column 'prompt'; {prompt_advice(columns)}")
    refused = {number: why for number, one in enumerate(rows["prompt"]) if (why := fault_of_prompt(one)) is not None}
    if refused:
        raise DataError(f"{name}: {rows_and_reasons(refused, 'row {}'.format)}")


# Held-out rows that are trained on.


def n_trained_on(rows: Any, heldout: Any) -> int:
    """Return how many rows of a held-out table are trained on, too: with their prompt, but for system messages and space.

    Where training rows of that prompt differ in other columns (an environment reads them), these count as well.
    """
    held = [_asked(prompt) for prompt in heldout["prompt"]]
    places: dict[str, list[int]] = {asked: [] for asked in held}
    for number, prompt in enumerate(rows["prompt"]):
        places.get(_asked(prompt), []).append(number)
    others = {asked: {_others(rows[number]) for number in numbers} for asked, numbers in places.items()}
    return sum(
        len(others[asked]) == 1 or (len(others[asked]) > 1 and _others(heldout[number]) in others[asked])
        for number, asked in enumerate(held)
    )


def trained_on_line(n: int, n_heldout: int) -> str:
    """Return what is said of held-out rows that are trained on."""
    return (
        f"{n} of {n_heldout} held-out rows have a prompt that is trained on: their success shows memorization. Hold out "
        f"other rows (--eval_share 0.1 takes them from the training rows)"
    )


def _asked(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return row_key(
        [
            {**message, "content": " ".join(str(message["content"]).split())}
            for message in messages
            if message["role"] not in ("system", "developer")
        ]
    )


def _others(row: Mapping[str, Any]) -> str:
    """Return what tells rows of one prompt apart: their answers, for ids differ; without such, all other columns."""
    if row.get("answer") is not None:
        return str(row["answer"])
    return row_key([{name: value for name, value in row.items() if name != "prompt"}])
