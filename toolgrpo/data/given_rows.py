"""Rows that are given as a list of dicts, as scripts and notebooks have them, made into a dataset.

They are checked as those of a file are: a prompt is text or messages, an answer text or a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolgrpo.data.rows import RawRow, Row, good_rows
from toolgrpo.data.table import write_rows
from toolgrpo.errors import DataError


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
        RawRow(f"{name}[{place}]", row)
        if isinstance(row, Mapping)
        else RawRow(f"{name}[{place}]", None, f"a row must be a dict with named columns, but this is {row!r:.60}")
        for place, row in enumerate(rows)
    )
    return good_rows(raw, dict, _raise)


def _raise(error: DataError) -> None:
    raise error
