"""How long at least one of many was at something."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["BusyTime"]


class BusyTime:
    """A clock that runs while at least one `with` block over it is open."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._since_s = 0.0
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        return self._total_s + (self._clock() - self._since_s if self._open else 0.0)

    def __enter__(self) -> None:
        if self._open == 0:
            self._since_s = self._clock()
        self._open += 1

    def __exit__(self, *failure: object) -> None:
        self._open -= 1
        if self._open == 0:
            self._total_s += self._clock() - self._since_s
