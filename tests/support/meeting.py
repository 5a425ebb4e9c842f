"""Threads that stand for processes, and tell each other what processes would."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class Meeting:
    """`gather_object` among `n` threads; one that does not come breaks it after `patience_s`."""

    def __init__(self, n: int, patience_s: float = 30) -> None:
        self._barrier = threading.Barrier(n, timeout=patience_s)
        self._given: dict[int, list[Any]] = {}
        self.met: Counter[int] = Counter()  # how often each came before something collective

    def meet(self, process: int) -> None:
        self.met[process] += 1
        self._barrier.wait()

    def gather(self, process: int, values: list[Any]) -> list[Any]:
        """Return the values of all, in the order of their processes."""
        self._given[process] = values
        self._barrier.wait()
        everything = [one for process in sorted(self._given) for one in self._given[process]]
        self._barrier.wait()
        return everything
