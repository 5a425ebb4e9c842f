"""An event loop whose timers stand still while something outside of the episodes holds it.

A reward that is asked in the middle of a rollout runs in the loop's thread and may take seconds.
No deadline of an episode or a tool counts them: what ended meanwhile has ended in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class HoldingLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that `timers_held` stops."""

    held_s = 0.0

    def time(self) -> float:
        return super().time() - self.held_s


@contextmanager
def timers_held() -> Iterator[None]:
    """Let the block take no time for the timers of the running loop, if that is a `HoldingLoop`."""
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    try:
        yield
    finally:
        if isinstance(loop, HoldingLoop):
            loop.held_s += time.monotonic() - started
