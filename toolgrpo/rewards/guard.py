"""Ask a user's function with a deadline, and turn whatever goes wrong in it into one clear error.

A reward is careless, not hostile (SECURITY.md): it may hang, raise, exit, or return what cannot be read.
What it returns is read inside the same deadline, since lists and numbers may have code of their own.

Without a timeout the function runs in the caller's thread, because some need the main one (signals). With one it runs
in a thread that is left behind when the deadline passes; context variables, the gradient mode and the
CUDA device are the caller's there. Async functions share one loop, so that their clients live on.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

from toolgrpo.drops import DropEpisode
from toolgrpo.errors import InfrastructureError, RewardError
from toolgrpo.startup import on_this_device
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
        call, token = _Call(answer), _inside.set(True)
        try:
            with self._saying_lines(call):
                if self.timeout_s is None:
                    call.make()
                else:
                    _start("call", partial(call.make, _modes_of_caller()))
                    call.ended.wait(self.timeout_s)
        finally:
            _inside.reset(token)
        if call.ended.is_set():
            value: T = call.result()
            return value
        with _loops_lock:  # something may block this one for ever
            _loops.clear()
        _start("end", self._end_with_main_thread)
        raise RewardError(
            f"{self.what} has not returned within {self.timeout_s:g} s (reward_timeout){self._line_of(call)}. Give what "
            f"it waits for a deadline, or raise --reward_timeout if it is only slow."
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
    def _saying_lines(self, call: _Call) -> Iterator[None]:
        """Say a line every `every_s` seconds, from another thread, for as long as this lasts."""
        over, arming, started = threading.Event(), threading.Lock(), time.monotonic()
        wait_s = (self.every_s if self.timeout_s is None else self.timeout_s) + _NATIVE_S

        def arm() -> None:
            faulthandler.dump_traceback_later(wait_s, repeat=True, exit=self.timeout_s is not None, file=2)

        def speak() -> None:
            while not over.wait(self.every_s):
                self.say(f"{self.what} has been running for {time.monotonic() - started:.0f} s{self._line_of(call)}")
                with arming:
                    if self.timeout_s is None and not over.is_set():
                        arm()

        arm()
        _start("lines", speak)
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

    def _line_of(self, call: _Call) -> str:
        frame = sys._current_frames().get(call.thread)
        return "" if frame is None else self._line(traceback.extract_stack(frame))

    def _line(self, stack: traceback.StackSummary) -> str:
        """Return ` (line N)` of the innermost frame in the function's own file, else nothing."""
        lines = [frame.lineno for frame in stack if frame.filename == self.source.partition(":")[0]]
        return f" (line {lines[-1]})" if lines else ""


@dataclass
class _Call:
    """One call: the thread that makes it, and what it gave or raised."""

    function: Callable[[], Any]
    thread: int = field(default_factory=threading.get_ident)
    ended: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def make(self, as_caller: Callable[[], None] = lambda: None) -> None:
        self.thread = threading.get_ident()
        try:
            as_caller()
            self.value = self.function()
        except BaseException as error:  # raised again where it is waited for
            self.error = error
        finally:
            self.ended.set()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


async def asked_in_thread(ask: Callable[[], T]) -> T:
    """Return what `ask` gives in a thread of its own, so that the loop goes on meanwhile.

    The thread is left behind where this is cancelled.
    """
    loop, ended, call, as_caller = asyncio.get_running_loop(), asyncio.Event(), _Call(ask), _modes_of_caller()

    def run() -> None:
        call.make(as_caller)
        with suppress(RuntimeError):  # nobody waited so long, and the loop is closed
            loop.call_soon_threadsafe(ended.set)

    _start("group", run)
    await ended.wait()
    value: T = call.result()
    return value


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


def _start(name: str, run: Callable[[], None]) -> None:
    """Start a thread that has the caller's context and is left behind when the process ends."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=f"toolgrpo-reward-{name}", daemon=True).start()


def _modes_of_caller() -> Callable[[], None]:
    """Return a function that, called in another thread, gives it this thread's gradient mode and device."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "is_grad_enabled"):
        return lambda: None
    return on_this_device(partial(torch.set_grad_enabled, torch.is_grad_enabled()))


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return the result of a coroutine, run on the loop that all async rewards share."""

    async def run() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:  # a SystemExit would end the loop's thread
            return None, error

    with _loops_lock:
        if not _loops:
            _loops.append(LoopThread("toolgrpo-reward-loop"))
        future = _loops[-1].submit(run())
    try:
        value, error = future.result()
    except BaseException:  # Ctrl-C here; nobody waits for it any more
        future.cancel()
        raise
    if error is not None:
        raise error
    return value
