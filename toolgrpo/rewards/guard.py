"""Run a reward function so that it neither hangs a training, nor ends it, nor changes the process.

Without a timeout the function runs in the caller's thread, since some need the main one (signals,
say). With one it runs in a thread that is left behind when the deadline passes; context variables,
the gradient mode and the CUDA device are the caller's there. Async functions share one loop.

Put back afterwards, and said once: `sys.stdin`, `sys.stdout` and `sys.stderr`, the descriptors 0, 1
and 2, the working folder, the handlers of signals, torch's gradient mode and default dtype.
`os._exit` is an error there, not the end of the run; processes that the function has forked may end
themselves with it, and one that comes back from the function ends.

A function that holds the interpreter in one native call (a pattern that backtracks, a huge power)
lets no other thread speak: then `faulthandler` writes where it is to standard error, and where
there is a timeout ends the process 10 s after it.
Not covered: two rewards that run at the same time in one process each say their lines, but share
that last resort; `os.abort`, `os.exec*` and signals to this process; whatever else a function changes.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

from toolgrpo.errors import RewardError
from toolgrpo.startup import on_this_device

logger = logging.getLogger(__name__)
T = TypeVar("T")

_THREADS = "toolgrpo-reward"  # how the names of the threads begin in which rewards run
_NATIVE_S = 10.0  # after a line or a deadline that was missed, the interpreter is held
_LEAVE_S = 60.0  # for the end of the process, once a function was left behind in it
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside_a_reward", default=False)
_real_exit = os._exit
_guarded: list[tuple[int, int]] = []  # the process and the thread of each that is under way
_already_said: set[str] = set()
_loops: list[asyncio.AbstractEventLoop] = []  # the one that async rewards run on
_loops_lock = threading.Lock()


@dataclass(frozen=True)
class RewardGuard:
    """Watch over the calls of one reward: `what` names it, `source` is its file, `say` tells a person."""

    what: str
    source: str
    timeout_s: float | None = None
    say: Callable[[str], None] = logger.warning
    every_s: float = 60.0  # between the lines of one that runs long

    def run(self, function: Callable[[], Any]) -> Any:
        """Return or raise what the function does, awaited if it can be; RewardError when the timeout passes."""
        if _inside.get():  # a reward that calls others, as by_task does
            return _result_of(function)
        call, token = _Call(function), _inside.set(True)
        try:
            with self._restored_state(), self._saying_lines(call):
                if self.timeout_s is None:
                    call.make()
                else:
                    _start("call", partial(call.make, _modes_of_caller()))
                    call.ended.wait(self.timeout_s)
        finally:
            _inside.reset(token)
        if call.ended.is_set():
            return call.result()
        place = _line_of_thread(call.thread, self.source)
        with _loops_lock:  # something may block this one for ever
            _loops.clear()
        _start("end", self._end_with_main_thread)
        raise RewardError(
            f"{self.what} has not returned within {self.timeout_s:g} s (reward_timeout){place}. Give what it waits for a "
            f"deadline, or raise --reward_timeout if it is only slow."
        )

    @contextmanager
    def _saying_lines(self, call: _Call) -> Iterator[None]:
        """Say a line every `every_s` seconds, from another thread, for as long as this lasts."""
        over, arming, started = threading.Event(), threading.Lock(), time.monotonic()
        wait_s = (self.every_s if self.timeout_s is None else self.timeout_s) + _NATIVE_S

        def arm() -> None:
            faulthandler.dump_traceback_later(wait_s, repeat=True, exit=self.timeout_s is not None, file=2)

        def speak() -> None:
            while not over.wait(self.every_s):
                place = _line_of_thread(call.thread, self.source)
                self._say_safely(f"{self.what} has been running for {time.monotonic() - started:.0f} s{place}")
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

    @contextmanager
    def _restored_state(self) -> Iterator[None]:
        process, descriptors = os.getpid(), [_copy(fd) for fd in range(3)]
        before = [(kept, kept.read()) for kept in _kept_things()]
        open_streams = [name for name in _STREAMS if not _is_closed(name)]
        try:
            with guarded_exit():
                yield
        finally:
            if os.getpid() != process:  # a second trainer would go on from here
                _real_exit(1)
            changed = [f"the descriptor {fd}" for fd, copy in enumerate(descriptors) if _put_back(fd, copy)]
            changed += [kept.name for kept, value in before if kept.put_back(value)]
            for name in filter(_is_closed, open_streams):  # cannot be opened again: another one in its place
                fd = _STREAMS.index(name)
                mode = "w" if fd else "r"
                setattr(sys, name, os.fdopen(fd, mode, 1, errors="backslashreplace", closefd=False))
                changed.append(f"sys.{name}")
            for text in (f"{self.what} changed {change}, which is put back each time" for change in changed):
                if text not in _already_said:
                    _already_said.add(text)
                    self._say_safely(text)

    def _say_safely(self, text: str) -> None:
        with suppress(Exception):  # the reward may have closed what this writes to
            self.say(text)

    def _end_with_main_thread(self) -> None:
        """End the process when its main thread has ended but waits for threads that the function has left behind."""
        threading.main_thread().join()
        time.sleep(_LEAVE_S)
        with suppress(OSError):
            os.write(2, f"toolgrpo: {self.what} still runs; the process ends without it\n".encode(errors="replace"))
        _real_exit(1)


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
            self.value = _result_of(self.function)
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


def line_of(stack: traceback.StackSummary, source: str) -> str:
    """Return ` (line N)` of the innermost frame in the reward's own file, else nothing."""
    path = source.partition(":")[0]
    lines = [frame.lineno for frame in stack if frame.filename == path]
    return f" (line {lines[-1]})" if lines else ""


def _line_of_thread(thread: int, source: str) -> str:
    frame = sys._current_frames().get(thread)
    return "" if frame is None else line_of(traceback.extract_stack(frame), source)


@contextmanager
def guarded_exit() -> Iterator[None]:
    """Make `os._exit` raise SystemExit in this thread, and in any with code 0; a forked process may still use it."""
    guarded = (os.getpid(), threading.get_ident())
    _guarded.append(guarded)
    os._exit = _leave
    try:
        yield
    finally:
        _guarded.remove(guarded)
        if not _guarded:
            os._exit = _real_exit


def _leave(status: int) -> NoReturn:
    """Stand in for `os._exit`; who has taken a copy of it while a file was loaded is guarded whenever it runs."""
    threads = [thread for process, thread in _guarded if process == os.getpid()]
    ours = threading.get_ident() in threads or threading.current_thread().name.startswith(_THREADS)
    if not threads or (status != 0 and not ours):
        _real_exit(status)
    raise SystemExit(f"os._exit({status})")


def _start(name: str, run: Callable[[], None]) -> None:
    """Start a thread that has the caller's context and is left behind when the process ends."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=f"{_THREADS}-{name}", daemon=True).start()


def _result_of(function: Callable[[], Any]) -> Any:
    returned = function()
    return _wait_for(returned) if inspect.isawaitable(returned) else returned


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return the result of a coroutine, run on the loop that all async rewards share, so that their clients live on."""

    async def run() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:  # a SystemExit would end the loop's thread
            return None, error

    with _loops_lock:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_serve, args=tuple(_loops), name=f"{_THREADS}-loop", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(run(), _loops[-1])
    try:
        value, error = future.result()
    except BaseException:  # Ctrl-C here; nobody waits for it any more
        future.cancel()
        raise
    if error is not None:
        raise error
    return value


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():
        with suppress(BaseException):  # a task that exits has its exception; the loop serves the others
            loop.run_forever()


@dataclass(frozen=True)
class _Kept:
    """Something of the process, with what reads and sets it; None where there is none to put back."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def put_back(self, before: Any) -> bool:
        now = self.read()
        if before is None or now is before or now == before:
            return False
        with suppress(ValueError):  # a handler of signals, which the main thread alone can set
            self.write(before)
            return True
        return False


_STREAMS = ("stdin", "stdout", "stderr")


def _kept_things() -> list[_Kept]:
    kept = [_Kept(f"sys.{name}", partial(getattr, sys, name, None), partial(setattr, sys, name)) for name in _STREAMS]
    kept.append(_Kept("the working folder", _working_folder, _enter_folder))
    for number in signal.valid_signals():
        name = f"the handler of {getattr(number, 'name', number)}"
        kept.append(_Kept(name, partial(signal.getsignal, number), partial(signal.signal, number)))
    if (torch := _torch()) is not None:
        kept.append(_Kept("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled))
        kept.append(_Kept("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype))
    return kept


def _torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "is_grad_enabled") else None


def _modes_of_caller() -> Callable[[], None]:
    """Return a function that, called in another thread, gives it this thread's modes of torch."""
    torch = _torch()
    if torch is None:
        return lambda: None
    return on_this_device(partial(torch.set_grad_enabled, torch.is_grad_enabled()))


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _enter_folder(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise RewardError(f"the working folder {folder} cannot be entered again: {error.strerror}") from error


def _is_closed(stream: str) -> bool:
    return bool(getattr(getattr(sys, stream, None), "closed", False))


def _copy(fd: int) -> int | None:
    with suppress(OSError):
        return os.dup(fd)
    return None


def _put_back(fd: int, copy: int | None) -> bool:
    """Give a descriptor what it was a copy of; return whether it was anything else."""
    if copy is None:
        return False
    try:
        is_same = os.path.samestat(os.fstat(fd), os.fstat(copy))
    except OSError:
        is_same = False
    if not is_same:
        os.dup2(copy, fd)
    os.close(copy)
    return not is_same
