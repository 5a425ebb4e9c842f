"""An event loop on a thread of its own, that outlives the loops of training steps.

Every rollout may run on a fresh loop (`asyncio.run` per step), while tool workers and MCP sessions live for the whole
run. So what they need a loop for lives here, and results are handed over as `concurrent.futures.Future`, which any
thread and any loop can wait for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs one event loop until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and end the thread. Safe to call twice."""
        if self.loop.is_closed():
            return
        if self._thread.is_alive():
            self.submit(_cancel_all())
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    """Cancel every other task, give each a moment to clean up, and stop the loop."""
    loop = asyncio.get_running_loop()
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=3.0)
    loop.call_soon(loop.stop)
