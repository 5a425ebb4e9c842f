"""What a reward function finds in this process is there when it has returned.

Kept: `sys.stdin`, `sys.stdout` and `sys.stderr`, the descriptors 0, 1 and 2, the working folder, the
handlers of signals, torch's gradient mode and default dtype. What was changed is put back, and said
once. `os._exit` in the function is an error there, not the end of the run; processes that it has
forked may end themselves with it, and one that comes back from the function ends.

Not covered: `os.abort`, `os.exec*` and signals to this process; everything else that a function can
change.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from toolgrpo.errors import RewardError

THREADS = "toolgrpo-reward"
"""How the names of the threads begin in which rewards run."""

real_exit = os._exit
_STREAMS = ("stdin", "stdout", "stderr")
_already_said: set[str] = set()
_guarded: list[tuple[int, int]] = []  # the process and the thread of each that is under way


@contextmanager
def restored_state(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Put back afterwards what the reward `what` has changed, and `say` so."""
    process, streams, torch_before = os.getpid(), _Streams.current(), _modes_of_torch()
    folder, handlers = _working_folder(), _handlers()
    try:
        with guarded_exit():
            yield
    finally:
        if os.getpid() != process:  # a second trainer would go on from here
            real_exit(1)
        changed = [
            *streams.restore(),
            *_restore_torch(torch_before),
            *_restore_handlers(handlers),
            *_restore_folder(folder),
        ]
        for change in changed:
            text = f"{what} changed {change}, which is put back each time"
            if text not in _already_said:
                _already_said.add(text)
                say(text)


@contextmanager
def guarded_exit() -> Iterator[None]:
    """Make `os._exit` raise SystemExit in this thread, and in any with code 0.

    A forked process may still use it.
    """
    guarded = (os.getpid(), threading.get_ident())
    before = os._exit
    _guarded.append(guarded)
    os._exit = _leave
    try:
        yield
    finally:
        _guarded.remove(guarded)
        os._exit = before


def _leave(status: int) -> NoReturn:
    """Stand in for `os._exit`.

    Who has taken a copy of it while a file was loaded is guarded whenever it runs.
    """
    threads = [thread for process, thread in _guarded if process == os.getpid()]
    ours = threading.get_ident() in threads or threading.current_thread().name.startswith(THREADS)
    if not threads or (status != 0 and not ours):
        real_exit(status)
    raise SystemExit(f"os._exit({status})")


@dataclass(frozen=True, slots=True)
class _Streams:
    """The standard streams of one moment: the objects, and copies of the descriptors (None: it was
    closed).
    """

    objects: tuple[Any, Any, Any]
    copies: tuple[int | None, int | None, int | None]
    closed: tuple[bool, bool, bool]

    @classmethod
    def current(cls) -> _Streams:
        objects = (sys.stdin, sys.stdout, sys.stderr)
        closed = (_is_closed(sys.stdin), _is_closed(sys.stdout), _is_closed(sys.stderr))
        return cls(objects, (_copy(0), _copy(1), _copy(2)), closed)

    def restore(self) -> list[str]:
        """Put them back; return the names of those that were changed."""
        changed = []
        kept = zip(_STREAMS, self.objects, self.copies, self.closed, strict=True)
        for fd, (name, before, copy, was_closed) in enumerate(kept):
            if copy is not None:
                if not _is_same_file(fd, copy):
                    os.dup2(copy, fd)
                    changed.append(f"the descriptor {fd}")
                os.close(copy)
            if getattr(sys, name, None) is not before:
                setattr(sys, name, before)
                changed.append(f"sys.{name}")
            if _is_closed(before) and not was_closed:  # cannot be opened again: another one in its place
                mode = "r" if name == "stdin" else "w"
                setattr(sys, name, os.fdopen(fd, mode, 1, errors="backslashreplace", closefd=False))
                changed.append(f"sys.{name}")
        return changed


def _is_closed(stream: Any) -> bool:
    return bool(getattr(stream, "closed", False))


def _copy(fd: int) -> int | None:
    with suppress(OSError):
        return os.dup(fd)
    return None


def _is_same_file(fd: int, copy: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.fstat(copy))
    except OSError:
        return False


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _restore_folder(before: str | None) -> list[str]:
    if before is None or _working_folder() == before:
        return []
    try:
        os.chdir(before)
    except OSError as error:
        raise RewardError(f"the working folder {before} cannot be entered again: {error.strerror}") from error
    return ["the working folder"]


def _handlers() -> dict[int, Any]:
    """Return the handler of each signal; None: one that Python did not set, and cannot put back."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _restore_handlers(before: dict[int, Any]) -> list[str]:
    """Put the handlers back; only the main thread can have changed them."""
    changed = []
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            with suppress(ValueError):
                signal.signal(number, handler)
                changed.append(f"the handler of {signal.Signals(number).name}")
    return changed


def _modes_of_torch() -> tuple[bool, Any] | None:
    """Return the gradient mode and the default dtype.

    None where torch is not imported, which then has its own defaults.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_grad_enabled"):
        return None
    return torch.is_grad_enabled(), torch.get_default_dtype()


def _restore_torch(before: tuple[bool, Any] | None) -> list[str]:
    now = _modes_of_torch()
    if now is None:
        return []
    torch: Any = sys.modules["torch"]
    gradients, dtype = before or (True, torch.float32)
    changed = []
    if now[0] != gradients:
        torch.set_grad_enabled(gradients)
        changed.append("torch's gradient mode")
    if now[1] != dtype:
        torch.set_default_dtype(dtype)
        changed.append("torch's default dtype")
    return changed


def caller_of_torch() -> Callable[[], None]:
    """Return a function that, called in another thread, gives it this thread's modes of torch."""
    modes = _modes_of_torch()
    if modes is None:
        return lambda: None
    torch: Any = sys.modules["torch"]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def take_over() -> None:
        torch.set_grad_enabled(modes[0])
        if device is not None:
            torch.cuda.set_device(device)

    return take_over
