"""What Linux offers to keep a process and its descendants in hand. Elsewhere each does nothing.

Not covered: `die_with_parent` follows the thread that forked, and is not inherited by what the
process forks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, not of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent ends; at once where `parent` has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it ended before the kernel was told to watch it
        os.kill(os.getpid(), signal.SIGKILL)


def wake_with_parents_end() -> None:
    """Have this process go on when its parent ends, if that has stopped it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def name_process(name: str) -> None:
    """Set the name that `ps` and `pkill` see, of 15 characters at most."""
    if _LINUX:
        _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()), 0, 0, 0)


def watch_process(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 where there is none."""
    if not _LINUX or not hasattr(os, "pidfd_open"):
        return -1
    with suppress(OSError):
        return os.pidfd_open(pid)
    return -1


def children(thread_id: int | None = None) -> list[int]:
    """Return the ids of this process's children, or of those that one of its threads started."""
    found: list[int] = []
    tasks = [str(thread_id)] if thread_id is not None else _entries("/proc/self/task")
    for task in tasks:
        with suppress(OSError):
            found += [int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()]
    return found


def kill_marked(variable: str) -> None:
    """Kill the processes of this user that were started with this environment variable.

    For those that no parent answers for.
    """
    mark = f"{variable}=".encode()
    for name in _entries("/proc"):
        with suppress(OSError, ValueError):  # no process, another user's, or one that has ended
            if mark in Path(f"/proc/{name}/environ").read_bytes() and int(name) != os.getpid():
                os.kill(int(name), signal.SIGKILL)


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    if _LINUX and _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
