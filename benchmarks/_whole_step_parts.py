"""What the parts of `whole_step.py` have in common: runs that are measured one by one, and what else ran meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _rows import Row

Run = dict[str, Any]  # `of` says what was measured
BUSY = 0.1  # a share of other work from which it is said beside the numbers


@dataclass(frozen=True)
class Asked:
    """What the command asks for."""

    quick: bool
    seeds: tuple[int, ...]
    rounds: int
    model: str = ""  # a folder


@dataclass(frozen=True)
class Part:
    """One question: what is measured for it, in this order, and what the answer is."""

    plan: Callable[[Asked], Iterable[dict[str, Any]]]  # the `of` of each run
    measure: Callable[[dict[str, Any]], dict[str, Any]]
    rows: Callable[[list[Run]], list[Row]]


def label(runs: list[Run]) -> str:
    """What has to be said beside the numbers of a part."""
    quick = " (quick form)" if any(run["of"]["quick"] for run in runs) else ""
    shares = [run["other_work"] for run in runs if run["other_work"] is not None]
    busy = f" (other work took {max(shares):.0%} of the machine)" if shares and max(shares) > BUSY else ""
    return quick + busy


@contextmanager
def other_work() -> Iterator[list[float]]:
    """Give the share of the processors' time that was neither idle nor ours or our children's, after the block.

    Children count when they have ended and were waited for. Empty where the system does not tell.
    """
    share: list[float] = []
    before = _processor_seconds()
    yield share
    now = _processor_seconds()
    if now is not None and before is not None:
        whole, busy, own = (after - earlier for after, earlier in zip(now, before, strict=True))
        share += [min(1.0, max(0.0, busy - own) / whole)] if whole else []


def _processor_seconds() -> tuple[float, float, float] | None:
    """Since the start of the machine: all of it, what was not idle, and ours."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, idle, wait, *interrupts = (int(one) / os.sysconf("SC_CLK_TCK") for one in first[1:9])
    busy = user + nice + system + sum(interrupts)
    mine = os.times()
    return busy + idle + wait, busy, mine.user + mine.system + mine.children_user + mine.children_system
