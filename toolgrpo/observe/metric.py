"""A number for the log, and how those of several processes become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Metric(NamedTuple):
    """A number, and how those of several processes become one."""

    value: float
    over_processes: Callable[[Sequence[float]], float] = _mean


Metrics = dict[str, Metric]
