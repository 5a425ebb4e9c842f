"""What the parts of `whole_step.py` have in common: runs that are measured one by one, kept at once, and summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from _other_work import BUSY
from _rows import Row

__all__ = ["Asked", "Part", "Run", "label"]

Run = dict[str, Any]  # `of` says what was measured
Result = dict[str, Any]  # the runs of a part, and their `summary`


@dataclass(frozen=True)
class Asked:
    """What the command asks for."""

    quick: bool
    seeds: tuple[int, ...]
    rounds: int


@dataclass(frozen=True)
class Part:
    """One question: what is measured for it, in this order, and what the answer is."""

    plan: Callable[[Asked], Iterable[dict[str, Any]]]  # the `of` of each run
    measure: Callable[[dict[str, Any]], dict[str, Any]]
    summary: Callable[[list[Run]], dict[str, Any]]
    show: Callable[[Result], None]
    rows: Callable[[Result], list[Row]]


def label(result: Result) -> str:
    """What has to be said beside the numbers of a part."""
    quick = " (quick form)" if any(run["of"]["quick"] for run in result["runs"]) else ""
    shares = [run["other_work"] for run in result["runs"] if run["other_work"] is not None]
    busy = f" (other work took {max(shares):.0%} of the machine)" if shares and max(shares) > BUSY else ""
    return quick + busy
