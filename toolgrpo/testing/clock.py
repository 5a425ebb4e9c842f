"""Time under a test's control.

`FakeClock().run(coroutine)` runs a coroutine on an event loop whose time is the clock's: whenever
nothing is ready, the clock jumps to the next timer. `asyncio.sleep`, `asyncio.timeout` and every
deadline built on them keep their order and their exact lengths, and cost nothing.

Not covered: threads and subprocesses live in real time. While one of them is waited for with a
timeout, the clock jumps to that timeout at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class FakeClock:
    """A clock that stands still until all that is ready has run, and then jumps.

    Call it to read it.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass, e.g. for code that only reads the clock."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards; got {seconds}")
        self._now_s += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `asyncio.run` on this clock."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(main)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._clock()


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that moves the clock to the next timer instead of waiting for it."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        super().__init__()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(0)
        if not events:
            self._clock.advance(timeout)
        return events
