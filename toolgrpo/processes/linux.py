"""Linux calls that keep a process and its descendants under control. Elsewhere each does nothing.

Not covered: `die_with_parent` follows the thread that forked, and is not inherited by what the
process forks; off Linux, a tool's children that leave their process group outlive it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_CLONE_FS = 0x200
_LEAVING_S = 0.2  # a thread that was joined is listed for a moment longer
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, not of init."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent ends; at once where `parent` has ended already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it ended before the kernel was told to watch it
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    prctl(_PR_SET_PDEATHSIG, 0)


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


def own_directory_per_thread() -> bool:
    """Give the calling thread a working directory and umask of its own; True if that worked."""
    return _LINUX and _libc.unshare(_CLONE_FS) == 0


def offer_to_oom_killer(score: int) -> None:
    """Have the kernel kill this process before the trainer when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def limit_memory(megabytes: int) -> None:
    """Set an address-space limit (0: none), where the system takes one: macOS refuses it. Allow no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes > 0:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = megabytes * 1024 * 1024
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with nullcontext() if _LINUX else suppress(OSError, ValueError):  # Python's name for EINVAL is ValueError
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def kill_group(pid: int) -> None:
    """Kill a process and its group."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def open_descriptors() -> set[int]:
    """Return the descriptors that are open, without the standard three."""
    return {int(name) for name in _entries("/proc/self/fd") if int(name) > 2}


def forkable(descriptors_before: set[int]) -> bool:
    """Return whether this process may be forked safely.

    It may with one thread, and nothing opened since `descriptors_before`.
    """
    if not _LINUX or not _is_one_thread():
        return False
    opened = open_descriptors() - descriptors_before
    return not any(os.path.lexists(f"/proc/self/fd/{fd}") for fd in opened)  # the listing's own is closed by now


def _is_one_thread() -> bool:
    give_up = time.monotonic() + _LEAVING_S
    while len(_entries("/proc/self/task")) != 1:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True


def children(thread_id: int | None = None) -> list[int]:
    """Return the ids of this process's children, or of those that one of its threads started."""
    found: list[int] = []
    tasks = [str(thread_id)] if thread_id is not None else _entries("/proc/self/task")
    for task in tasks:
        with suppress(OSError):
            found += [int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()]
    return found


def end_children() -> None:
    """Kill all children; theirs become ours where orphans are adopted, so that none is left in the end."""
    while remaining := children():
        for pid in remaining:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


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


def prctl(option: int, value: int) -> None:
    """Set an option of this process; OSError where the kernel refuses it."""
    if _LINUX and _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
