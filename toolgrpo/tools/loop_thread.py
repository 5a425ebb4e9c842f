"""An event loop on a thread of its own, that outlives the loops of training steps.

Every rollout may run on a fresh loop (`asyncio.run` per step), while tool workers and MCP sessions
live for the whole run. So what they need a loop for lives here, and results are handed over as
`concurrent.futures.Future`, which any thread and any loop can wait for.

A tool's code may run on such a loop, and may stop it, or raise SystemExit or KeyboardInterrupt in a
callback or a task of its own, which asyncio lets through. The loop then goes on where it was: what
waits on it loses nothing.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_CLOSE_TIMEOUT_S = 5.0
_BEFORE_GOING_ON_S = 0.01  # a loop that was broken for good must not keep a processor busy
T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs one event loop until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Tell whether coroutines given to it can still run."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread. Safe to call twice."""
        if self.loop.is_closed():
            return
        if self._thread.is_alive():
            self.submit(self._cancel_all())
            self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        while not self._closing and not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except BaseException:  # code that runs on the loop; it may raise anything
                if sys.stderr is not None:
                    traceback.print_exc()
            if not self._closing:
                time.sleep(_BEFORE_GOING_ON_S)

    async def _cancel_all(self) -> None:
        """Cancel every other task, give each a moment to clean up, and stop the loop."""
        tasks = [task for task in asyncio.all_tasks(self.loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=3.0)
        self._closing = True
        self.loop.call_soon(self.loop.stop)
