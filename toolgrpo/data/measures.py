"""Measures of success that tasks bring with them, by the name that rows give in their column
`success_measure`.

A row without one is judged by its reward: an episode that reaches the threshold is a success. A
task has a measure of its own where that is not what a person would call success.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolgrpo.data import arithmetic
from toolgrpo.errors import DataError

Measure = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], bool]
"""`measure(messages, row)`: whether an episode with these messages after its prompt did the task of
this row.
"""


def _arithmetic(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> bool:
    return arithmetic.success(messages, row["answer"])


MEASURES: dict[str, Measure] = {"arithmetic": _arithmetic}


def measure_of(row: Mapping[str, Any]) -> Measure | None:
    """Return the measure that this row brings, or None where its reward decides."""
    name = row.get("success_measure")
    if name is None:
        return None
    if name not in MEASURES:
        raise DataError(
            f"a row asks for the success measure {name!r}, but there is only {', '.join(MEASURES)}; leave the column "
            f"`success_measure` out (an episode then succeeds if its reward reaches the threshold), or rename it"
        )
    return MEASURES[name]
