"""Share processor time among the patterns that read one text of a model.

What a pattern costs only its author can know, and `regex` stops one that takes longer than it is given. But it counts the
work of all threads of the process, and beside this one an engine may run many. So a pattern that was stopped is tried
again until this thread has itself worked so long: no turn is given up because others were busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 1.0  # most turns need a thousandth of it

T = TypeVar("T")


class RegexBudget:
    """Counts from when it is made, in the thread that makes it."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._started_s = time.thread_time()

    def spend(self, look: Callable[[float], T]) -> T:
        """Return what `look` gives, which is told how many seconds are left; `TimeoutError` when none are."""
        while True:
            left_s = self._limit_s - (time.thread_time() - self._started_s)
            if left_s <= 0:
                raise TimeoutError(f"it timed out after {self._limit_s:g} s")
            try:
                return look(left_s)
            except TimeoutError:
                continue
