"""Ask a user's function with a deadline, and turn whatever goes wrong in it into one clear error.

A reward is careless, not hostile (SECURITY.md): it may hang, raise, exit, or return what cannot be read.
What it returns is read inside the same deadline, since lists and numbers may have code of their own.

Without a timeout the function runs in the caller's thread, because some need the main one (signals). With one it runs
in a thread that is left behind when the deadline passes. Async functions share one loop, so that their clients live on.

A function that holds the interpreter in one native call (a pattern that backtracks) lets no other thread run: then
`faulthandler` writes where it is to standard error, and with a timeout ends the process 10 s after it.

Not covered: what a function changes in its process (streams, signal handlers, the working folder), and its `os._exit`.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import inspect
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.errors import InfrastructureError, RewardError
from toolgrpo.support.process_setup import on_this_device
from toolgrpo.support.shipped_files import PLUGINS, located
from toolgrpo.tools.loop_thread import LoopThread

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NATIVE_S = 10.0  # after a line or a deadline that was missed, the interpreter is held
_LEAVE_S = 60.0  # for the end of the process, once a function was left behind in it
_OURS = (DropEpisode, InfrastructureError, RewardError, KeyboardInterrupt)  # pass through as they are
_MOST_READ = 100_000  # values of a list; one that never ends would take all memory
_LARGEST = 3.4e38  # of the 32-bit floats in which TRL keeps rewards
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside_a_reward", default=False)
_loops: list[LoopThread] = []  # the one that async rewards run on
_loops_lock = threading.Lock()


@dataclass(frozen=True)
class RewardGuard:
    """Watch over the calls of one function: `what` names it, `source` is its file, `say` tells a person."""

    what: str
    source: str
    timeout_s: float | None = None
    say: Callable[[str], None] = logger.warning
    every_s: float = 60.0  # between the lines of one that runs long

    def ask(
        self,
        function: Callable[[], Any],
        read: Callable[[Any], T],
        place: Callable[[BaseException], str] = lambda error: "",
    ) -> T:
        """Return what `read` makes of what the function returns, awaited if it can be.

        Raise RewardError if either fails or the timeout passes; `place` says at which row.
        """
        answer = partial(self._answer, function, read, place)
        if _inside.get():  # a reward that asks others, as by_task does: the deadline is the outer one's
            return answer()
        token = _inside.set(True)
        try:
            if self.timeout_s is None:
                with self._saying_lines(threading.current_thread()):
                    return answer()
            call, thread = _thread("call", answer)
            with self._saying_lines(thread):
                thread.start()  # no earlier: it may let no other thread run
                wait([call], self.timeout_s)
            if call.done():
                return call.result()
        finally:
            _inside.reset(token)
        with _loops_lock:  # something may block this one for ever
            _loops.clear()
        _thread("end", self._end_with_main_thread)[1].start()
        raise RewardError(
            f"{self.what} has not returned within {self.timeout_s:g} s (reward_timeout){self._line_of(thread)}. Set a "
            f"deadline for the operation that it waits for, or raise --reward_timeout if it is only slow."
        )

    def _answer(
        self, function: Callable[[], Any], read: Callable[[Any], T], place: Callable[[BaseException], str]
    ) -> T:
        try:
            returned = function()
            if inspect.isawaitable(returned):
                returned = _wait_for(returned)
        except _OURS:
            raise
        except BaseException as error:  # a plugin may raise anything, SystemExit included; it must not look like ours
            line = self._line(traceback.extract_tb(error.__traceback__))
            raise RewardError(
                f"{self.what} raised {described(error)}{line}{place(error)}. Fix the function or the row."
            ) from error
        try:
            return read(returned)
        except _OURS:
            raise
        except BaseException as error:  # what it returned has code of its own
            raise RewardError(
                f"{self.what} returned {short(returned)}, which cannot be read as numbers: {described(error)}"
            ) from error

    @contextmanager
    def _saying_lines(self, thread: threading.Thread) -> Iterator[None]:
        """Say where the thread is every `every_s` seconds, from another one, for as long as this lasts."""
        over, arming, started = threading.Event(), threading.Lock(), time.monotonic()
        wait_s = (self.every_s if self.timeout_s is None else self.timeout_s) + _NATIVE_S

        def arm() -> None:
            faulthandler.dump_traceback_later(wait_s, repeat=True, exit=self.timeout_s is not None, file=2)

        def speak() -> None:
            while not over.wait(self.every_s):
                self.say(f"{self.what} has been running for {time.monotonic() - started:.0f} s{self._line_of(thread)}")
                with arming:
                    if self.timeout_s is None and not over.is_set():
                        arm()

        arm()
        _thread("lines", speak)[1].start()
        try:
            yield
        finally:
            with arming:
                over.set()
                faulthandler.cancel_dump_traceback_later()

    def _end_with_main_thread(self) -> None:
        """End the process when its main thread has ended but waits for threads that the function has left behind."""
        threading.main_thread().join()
        time.sleep(_LEAVE_S)
        with suppress(OSError):
            os.write(2, f"toolgrpo: {self.what} still runs; the process ends without it\n".encode(errors="replace"))
        os._exit(1)

    def _line_of(self, thread: threading.Thread) -> str:
        frame = sys._current_frames().get(thread.ident or 0)
        return "" if frame is None else self._line(traceback.extract_stack(frame))

    def _line(self, stack: traceback.StackSummary) -> str:
        """Return ` (line N)` of the innermost frame in the function's own file, else nothing."""
        own = str(located(Path(self.source.partition(":")[0]), PLUGINS).resolve())  # as it was imported
        lines = [frame.lineno for frame in stack if frame.filename == own]
        return f" (line {lines[-1]})" if lines else ""


async def asked_in_thread(ask: Callable[[], T]) -> T:
    """Return what `ask` gives in a thread of its own, which is left behind where this is cancelled."""
    call, thread = _thread("group", ask)
    thread.start()
    return await asyncio.wrap_future(call)


def _thread(name: str, function: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    """Return a thread for a function, to be started, and the future of what the function returns.

    Context variables, the gradient mode and the CUDA device are the caller's there. The end of the process leaves it behind.
    """
    context, as_caller, future = contextvars.copy_context(), _modes_of_caller(), Future[T]()
    future.set_running_or_notify_cancel()  # whoever stops waiting for it cannot cancel it

    def run() -> None:
        try:
            as_caller()
            future.set_result(context.run(function))
        except BaseException as error:  # raised again where it is waited for
            future.set_exception(error)

    return future, threading.Thread(target=run, name=f"toolgrpo-reward-{name}", daemon=True)


def _modes_of_caller() -> Callable[[], None]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "is_grad_enabled"):
        return lambda: None
    return on_this_device(partial(torch.set_grad_enabled, torch.is_grad_enabled()))


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _wait_for(awaitable: Awaitable[T]) -> T:
    """Return the result of a coroutine, run on the loop that all async rewards share."""
    with _loops_lock:
        if not _loops:
            _loops.append(LoopThread("toolgrpo-reward-loop"))
        future = _loops[-1].submit(_awaited(awaitable))
    try:
        return future.result()
    finally:
        future.cancel()  # after Ctrl-C here nobody waits for it any more


def listed(value: Any) -> list[Any] | None:
    """Return a plain list of what a list, tuple or array holds; None for anything else."""
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return None
    return [item for item in islice(value, _MOST_READ)]  # noqa: C416 - list() would believe its __len__


def finite(value: Any) -> float | None:
    """Return a real number as a plain float; None for anything else, NaN, and what TRL's floats cannot hold."""
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None


def described(error: BaseException) -> str:
    """Describe an error in one line, also one that cannot say what it is."""
    return f"{type(error).__name__}: {_text(error, str, 'text')}".rstrip(": ")


def short(value: Any) -> str:
    """Describe a value by its type and the start of its text."""
    text = _text(value, repr, "repr")
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _text(value: Any, show: Callable[[Any], str], name: str) -> str:
    try:
        return show(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"(its {name} raises {type(error).__name__})"
