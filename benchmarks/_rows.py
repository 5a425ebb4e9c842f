"""A row of what was measured: ours, what stands beside it, the ratio, the bound; and rows as a table.

Each benchmark has a function `rows(results)` that makes its rows from its own JSON, of today or of an earlier version. What
a JSON has not kept stays empty, and is never made up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

COLUMNS = ("what", "ours", "beside it", "times better", "bound", "target")
T_975 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), 2))  # Student's, by the count


@dataclass(frozen=True, slots=True)
class Figure:
    """A number; where it is the median of repetitions, their least and most, and how many they were."""

    value: float
    least: float | None = None
    most: float | None = None
    n: int | None = None

    @classmethod
    def of(cls, repetitions: Sequence[float]) -> Figure:
        return cls(median(repetitions), min(repetitions), max(repetitions), len(repetitions))

    @classmethod
    def of_steps(cls, repetitions: Sequence[float]) -> Figure:
        """Return the mean of steps: with several batches in flight short and long ones take turns."""
        return cls(fmean(repetitions), min(repetitions), max(repetitions), len(repetitions))

    @classmethod
    def of_seeds(cls, values: Sequence[float]) -> Figure:
        """Return the mean with its interval at 95 % (Student's t), which takes two values or more."""
        mean, n = fmean(values), len(values)
        if n not in T_975:
            return cls(mean, n=n)
        half = T_975[n] * stdev(values) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)

    @classmethod
    def of_ratios(cls, pairs: Iterable[tuple[float, float]]) -> Figure:
        """Return the geometric mean of the ratios with its interval at 95 %."""
        log = cls.of_seeds([math.log(one / other) for one, other in pairs])
        least, most = (None if end is None else math.exp(end) for end in (log.least, log.most))
        return cls(math.exp(log.value), least, most, log.n)

    @classmethod
    def kept(cls, value: float, repetitions: Sequence[float] | None, n: int | None = None) -> Figure:
        """Return the number with its repetitions if the JSON has kept them, else alone."""
        return cls.of(repetitions) if repetitions else cls(value, n=n)

    @property
    def signed(self) -> str:
        """The number as a difference, with its interval."""
        interval = "" if self.least is None else f" [{self.least:+.3f}, {self.most:+.3f}]"
        return f"{self.value:+.3f}{interval}"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, or one number that has nothing beside it."""

    what: str
    ours: Figure | None = None
    unit: str = "s"
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


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of a table, without the columns that none of them has."""
    if not rows:
        return []
    cells = [_cells(row) for row in rows]
    used = [place for place in range(len(COLUMNS)) if any(one[place] for one in cells)]
    head = [COLUMNS[place] for place in used]
    lines = [head, ["---"] * len(head), *([one[place] for place in used] for one in cells)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cells(row: Row) -> list[str]:
    ours, other = (_figure(figure, row.unit) for figure in (row.ours, row.other))
    if row.ratio is not None and (row.ratio.least is not None or row.ratio.n):
        times = _figure(row.ratio, "")
    else:
        times = "" if row.times_better is None else _number(row.times_better)
    bound = "" if row.bound is None else f"{_number(row.bound)} {row.unit}"
    beside = ": ".join(filter(None, (row.other_name, other)))
    return [cell.replace("|", "\\|").strip() for cell in (row.what, ours, beside, times, bound, row.target)]


def _figure(figure: Figure | None, unit: str) -> str:
    if figure is None:
        return ""
    said = f"{_number(figure.value)} {unit}".strip()
    n = f"n={figure.n}" if figure.n else ""
    spread = "" if figure.least is None or figure.most is None else f"{_number(figure.least)} to {_number(figure.most)}"
    inside = ", ".join(filter(None, (spread if figure.n != 1 else "", n)))
    return f"{said} ({inside})" if inside else said


def _number(value: float) -> str:
    """Three digits, or all of a larger number."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:#.3g}".removesuffix(".")
