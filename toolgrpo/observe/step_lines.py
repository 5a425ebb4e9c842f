"""One aligned line per log of a training, and the titles above the columns.

Pure functions of what TRL logs. A column without its metric shows a dash; on a narrow terminal
those that say least are left out, so that a line is a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Log = Mapping[str, float]
_MISSING = "-"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, on the average since the last log."""

    whole: float
    rollout: float


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    text: Callable[[Log], str]
    rank: int = 0  # the highest goes first where there is no room


def _number(name: str, form: str = ".2f") -> Callable[[Log], str]:
    def text(log: Log) -> str:
        value = log.get(name)
        return _MISSING if value is None else format(value, form)

    return text


def _percent(name: str, of: Callable[[float], float] = lambda share: share) -> Callable[[Log], str]:
    def text(log: Log) -> str:
        value = log.get(name)
        return _MISSING if value is None else f"{100 * of(value):.0f}%"

    return text


def _live(log: Log) -> str:
    """Return the share of live groups: of those that were drawn, where dead ones are replaced."""
    drawn = log.get("sampling/live_rate")
    return (
        _percent("reward/groups_without_spread", lambda dead: 1 - dead)(log) if drawn is None else f"{100 * drawn:.0f}%"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


_COLUMNS = (
    _Column("reward", 6, _number("reward")),
    _Column("success", 7, _number("success")),
    _Column("live", 4, _live),
    _Column("turns", 5, _number("rollout/turns", ".1f"), 3),
    _Column("calls", 5, _number("tools/call_frequency", ".1f")),
    _Column("failed", 6, _percent("tools/failure_frequency")),
    _Column("length", 6, _number("completions/mean_length", ".0f"), 2),
    _Column("entropy", 7, _number("entropy"), 4),
    _Column("engine+-", 8, _number("sampling/sampling_logp_difference/mean", ".1e"), 5),
)
_TIMES = (("s/step", 6, 1), ("rollout", 7, 6), ("training", 8, 7))  # title, width, rank


class StepLines:
    """The titles and lines of one training of `total` steps, for a terminal so wide (None: any)."""

    def __init__(self, total: int, width: int | None = None) -> None:
        self._total = total
        columns = [*_COLUMNS, *(_Column(title, wide, lambda log: "", rank) for title, wide, rank in _TIMES)]
        self._first = max(4, 2 * len(str(total)) + 1)
        while width is not None and self._first + sum(c.width + 1 for c in columns) >= width:
            least = max(columns, key=lambda column: column.rank)
            if least.rank == 0:
                break
            columns.remove(least)
        self._columns = columns

    def titles(self) -> str:
        return self._joined("step", {column.title: column.title for column in self._columns})

    def line(self, step: int, log: Log, times: StepTimes) -> str:
        texts = {column.title: column.text(log) for column in self._columns}
        texts |= {
            "s/step": _seconds(times.whole),
            "rollout": _seconds(times.rollout),
            "training": _seconds(max(0.0, times.whole - times.rollout)),
        }
        return self._joined(f"{step}/{self._total}", texts)

    def _joined(self, first: str, texts: Mapping[str, str]) -> str:
        return " ".join([first.rjust(self._first), *(texts[c.title].rjust(c.width) for c in self._columns)])
