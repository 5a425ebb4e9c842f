"""Run a reward function so that it neither hangs a training without a word nor ends it.

Without a timeout the function runs in the caller's thread, since some need the main one (signals,
say). With one it runs in a thread that is left behind when the deadline passes; context variables,
the gradient mode and the CUDA device are the caller's there.

A function that holds the interpreter in one native call (a pattern that backtracks, a huge power)
lets no other thread speak: then `faulthandler` writes where it is to standard error, and where
there is a timeout ends the process 10 s after it.
Not covered: two rewards that run at the same time in one process each say their lines, but share
that last resort.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.errors import RewardError
from toolgrpo.rewards.process_state import THREADS, caller_of_torch, real_exit, restored_state
from toolgrpo.rewards.withdrawal import RewardWithdrawn, cancelled_by_withdrawal

logger = logging.getLogger(__name__)

_NATIVE_S = 10.0  # after a line or a deadline that was missed, the interpreter is held
_LEAVE_S = 60.0  # for the end of the process, once a function was left behind in it
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside_a_reward", default=False)


@dataclass(frozen=True)
class Oversight:
    """How the calls of one reward are watched.

    `what` names it; `source` is its file; `say` tells a person.
    """

    what: str
    source: str
    timeout_s: float | None = None
    say: Callable[[str], None] = logger.warning
    every_s: float = 60.0  # between the lines of one that runs long

    def run(self, function: Callable[[], Any]) -> Any:
        """Return or raise what the function does, awaited if it can be.

        RewardError when the timeout passes.
        """
        if _inside.get():  # a reward that calls others, as by_task does
            return result_of(function)
        token = _inside.set(True)
        try:
            with restored_state(self.what, self._say_safely):
                if self.timeout_s is not None:
                    return self._run_in_thread(function, self.timeout_s)
                with self._saying_lines(_Call(threading.get_ident())):
                    return result_of(function)
        finally:
            _inside.reset(token)

    def _run_in_thread(self, function: Callable[[], Any], timeout_s: float) -> Any:
        call = _Call()
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(call.make, function, caller_of_torch()),
            name=f"{THREADS}-call",
            daemon=True,
        )
        with self._saying_lines(call):
            thread.start()
            ended = call.ended.wait(timeout_s)
        if ended:
            return call.result()
        place = line_of_thread(call.thread, self.source)
        _RewardLoop.leave()
        threading.Thread(target=_end_with_main_thread, args=(self.what,), name=f"{THREADS}-end", daemon=True).start()
        raise RewardError(
            f"{self.what} has not returned within {timeout_s:g} s (reward_timeout){place}. Give what it waits for a deadline, "
            f"or raise --reward_timeout if it is only slow."
        )

    @contextmanager
    def _saying_lines(self, call: _Call) -> Iterator[None]:
        """Say a line every `every_s` seconds, from another thread, for as long as this lasts."""
        over, arming = threading.Event(), threading.Lock()
        started = time.monotonic()

        def speak() -> None:
            while not over.wait(self.every_s - (time.monotonic() - started) % self.every_s):
                place = line_of_thread(call.thread, self.source)
                self._say_safely(f"{self.what} has been running for {time.monotonic() - started:.0f} s{place}")
                with arming:
                    if self.timeout_s is None and not over.is_set():
                        faulthandler.dump_traceback_later(self.every_s + _NATIVE_S, repeat=True, file=2)

        speaker = threading.Thread(target=speak, name=f"{THREADS}-lines", daemon=True)
        if self.timeout_s is None:
            faulthandler.dump_traceback_later(self.every_s + _NATIVE_S, repeat=True, file=2)
        else:
            faulthandler.dump_traceback_later(self.timeout_s + _NATIVE_S, exit=True, file=2)
        speaker.start()
        try:
            yield
        finally:
            with arming:
                over.set()
                faulthandler.cancel_dump_traceback_later()

    def _say_safely(self, text: str) -> None:
        with suppress(Exception):  # the reward may have closed what this writes to
            self.say(text)


@dataclass
class _Call:
    """One call: the thread that makes it, and what it gave or raised once it has ended in another
    thread.
    """

    thread: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def make(self, function: Callable[[], Any], as_caller: Callable[[], None]) -> None:
        self.thread = threading.get_ident()
        try:
            as_caller()
            self.value = result_of(function)
        except BaseException as error:  # raised again where it is waited for
            self.error = error
        finally:
            self.ended.set()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def line_of(frames: Iterable[tuple[str, int | None]], source: str) -> str:
    """Return ` (line N)` of the innermost frame in the reward's own file, else nothing.

    Each frame is (file, line).
    """
    path = source.partition(":")[0]
    lines = [line for file, line in frames if file == path]
    return f" (line {lines[-1]})" if lines else ""


def line_of_thread(thread: int, source: str) -> str:
    """Do as `line_of` for what a thread does at this moment."""
    frame = sys._current_frames().get(thread)
    frames: list[tuple[str, int | None]] = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return line_of(frames[::-1], source)


def result_of(function: Callable[[], Any]) -> Any:
    returned = function()
    return _wait_for(returned) if inspect.isawaitable(returned) else returned


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return the result of a coroutine, run on the loop that all async rewards share.

    They share one so that their clients live on.
    """

    async def run() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:  # a SystemExit would end the loop's thread
            return None, error

    future = asyncio.run_coroutine_threadsafe(run(), _RewardLoop.get())
    withdrawal = cancelled_by_withdrawal(future.cancel)
    try:
        value, error = future.result()
    except BaseException as stopped:  # Ctrl-C here, or taken back; nobody waits for it any more
        future.cancel()
        if withdrawal is not None and withdrawal.withdrawn:
            raise RewardWithdrawn from stopped
        raise
    if error is not None:
        raise error
    return value


class _RewardLoop:
    """One event loop on a daemon thread, started when the first async reward is called."""

    _loop: asyncio.AbstractEventLoop | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                threading.Thread(target=cls._serve, args=(cls._loop,), name=f"{THREADS}-loop", daemon=True).start()
            return cls._loop

    @classmethod
    def leave(cls) -> None:
        """Give the next async reward a loop of its own: something may block this one for ever."""
        with cls._lock:
            cls._loop = None

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():
            with suppress(BaseException):  # a task that exits has its exception; the loop serves the others
                loop.run_forever()


def _end_with_main_thread(what: str) -> None:
    """End the process when its main thread has ended but waits for threads.

    They are those that the function left behind has started.
    """
    threading.main_thread().join()
    time.sleep(_LEAVE_S)
    with suppress(OSError):
        os.write(2, f"toolgrpo: {what} still runs; the process ends without it\n".encode(errors="replace"))
    real_exit(1)
