"""Take back a question to an async reward whose answer nobody wants any more.

Whoever asks enters `withdrawable` around the call, in the calling thread, and may then `withdraw`
from any other: what the reward awaits is cancelled, and the call raises `RewardWithdrawn`. The
context goes with the call into the loop that the reward runs on.

Not covered: a plain function, which nothing can interrupt.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from toolgrpo.rewards.process_state import THREADS, caller_of_torch

T = TypeVar("T")
_END_S = 10.0  # for a reward that was taken back to let go


class RewardWithdrawn(BaseException):
    """The caller no longer wants the reward; no error of the reward."""


@dataclass
class Withdrawal:
    """One question, and what to call to take it back."""

    withdrawn: bool = False
    _cancel: list[Callable[[], object]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def withdraw(self) -> None:
        with self._lock:
            self.withdrawn = True
            waiting, self._cancel = self._cancel, []
        for cancel in waiting:
            cancel()

    def on_withdraw(self, cancel: Callable[[], object]) -> None:
        """Call this when the question is taken back; at once, if it was."""
        with self._lock:
            if not self.withdrawn:
                self._cancel.append(cancel)
                return
        cancel()


_current: contextvars.ContextVar[Withdrawal | None] = contextvars.ContextVar("withdrawal", default=None)


@contextmanager
def withdrawable(withdrawal: Withdrawal) -> Iterator[None]:
    """Ask rewards in the block so that `withdrawal` can take the question back."""
    token = _current.set(withdrawal)
    try:
        yield
    finally:
        _current.reset(token)


def cancelled_by_withdrawal(cancel: Callable[[], object]) -> Withdrawal | None:
    """Let the question that is being asked, if it can be taken back, cancel what it waits for."""
    withdrawal = _current.get()
    if withdrawal is not None:
        withdrawal.on_withdraw(cancel)
    return withdrawal


async def asked_in_thread(ask: Callable[[], T]) -> T:
    """Return what `ask` gives in a thread of its own, so that the loop goes on meanwhile.

    Being cancelled takes the question back, and waits until it has ended, or for a while.
    """
    loop, ended, withdrawal = asyncio.get_running_loop(), asyncio.Event(), Withdrawal()
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        take_over()
        try:
            with withdrawable(withdrawal):
                answers.append(ask())
        except BaseException as error:  # raised where it is waited for
            failures.append(error)
        with suppress(RuntimeError):  # nobody waited so long, and the loop is closed
            loop.call_soon_threadsafe(ended.set)

    take_over = caller_of_torch()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=f"{THREADS}-group", daemon=True).start()
    try:
        await ended.wait()
    except asyncio.CancelledError:
        withdrawal.withdraw()
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _END_S)
        raise
    if failures:
        raise failures[0]
    return answers[0]
