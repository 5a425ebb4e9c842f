"""A row of the page of all measurements: ours, what stands beside it, the ratio, the bound.

Each benchmark has a function `rows(results)` that makes its rows from its own JSON, of today or of an earlier version; what
a JSON has not kept stays empty, and is never made up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Figure", "Row"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number; where it is the median of repetitions, their least and most, and how many they were."""

    value: float
    least: float | None = None
    most: float | None = None
    n: int | None = None

    @classmethod
    def of(cls, repetitions: Sequence[float]) -> Figure:
        return cls(statistics.median(repetitions), min(repetitions), max(repetitions), len(repetitions))

    @classmethod
    def of_steps(cls, repetitions: Sequence[float]) -> Figure:
        """Steps of trainings of which several batches are in flight: short and long ones take turns, so that their mean
        counts, and a median would be one or the other.
        """
        return cls(statistics.fmean(repetitions), min(repetitions), max(repetitions), len(repetitions))

    @classmethod
    def kept(cls, value: float, repetitions: Sequence[float] | None, n: int | None = None) -> Figure:
        """The number with its repetitions if the JSON has kept them, else alone."""
        return cls.of(repetitions) if repetitions else cls(value, n=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison, or one number that has nothing beside it."""

    benchmark: str
    what: str
    unit: str = "s"
    ours: Figure | None = None
    other: Figure | None = None
    other_name: str = ""
    ratio: Figure | None = None  # only where it was measured as one; else it is made from the two
    more_is_better: bool = False
    bound: float | None = None  # what ours cannot pass, in the same unit
    target: str = ""

    @property
    def times_better(self) -> float | None:
        """How many times better ours is; below 1 it is worse."""
        if self.ratio is not None:
            return self.ratio.value
        if self.ours is None or self.other is None:
            return None
        better, worse = (self.ours, self.other) if self.more_is_better else (self.other, self.ours)
        return better.value / worse.value if worse.value else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "times_better": self.times_better}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Row:
        figures = {name: Figure(**found[name]) for name in ("ours", "other", "ratio") if found[name] is not None}
        kept = {name: value for name, value in found.items() if name != "times_better"}
        return cls(**{**kept, **figures})
