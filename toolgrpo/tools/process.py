"""What Linux offers to keep a process and its descendants in hand, each with a harmless fallback elsewhere.

Not covered off Linux: a tool's children that leave their process group outlive it there.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "children",
    "die_with_parent",
    "first_to_be_killed",
    "forkable",
    "kill_group",
    "limit_memory",
    "open_descriptors",
    "own_directory_per_thread",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_FS = 0x200
_LINUX = sys.platform == "linux"


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, not of init."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(yes: bool = True) -> None:
    """SIGKILL this process when its parent ends, or no longer."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if yes else 0, 0, 0, 0)


def own_directory_per_thread() -> bool:
    """Give the calling thread a working directory and umask of its own; True if that worked."""
    return _LINUX and ctypes.CDLL(None).unshare(_CLONE_FS) == 0


def first_to_be_killed(score: int) -> None:
    """When the machine runs out of memory, the kernel takes this process before the trainer."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def limit_memory(megabytes: int) -> None:
    """An address-space limit (0: none), and no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes > 0:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = megabytes * 1024 * 1024
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def children(thread_id: int | None = None) -> list[int]:
    """The process ids of this process's children, or of those that one of its threads started."""
    found: list[int] = []
    tasks = [str(thread_id)] if thread_id is not None else _names("/proc/self/task")
    for task in tasks:
        with suppress(OSError):
            found += [int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()]
    return found


def kill_group(pid: int) -> None:
    """SIGKILL a process and its group."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def open_descriptors() -> set[int]:
    """Descriptors that are open now, without the standard three."""
    return {int(name) for name in _names("/proc/self/fd") if int(name) > 2}


def forkable(descriptors_before: set[int]) -> bool:
    """Whether this process may be forked safely: one thread, and nothing opened since `descriptors_before`."""
    if not _LINUX or len(_names("/proc/self/task")) != 1:
        return False
    opened = open_descriptors() - descriptors_before
    return not any(os.path.lexists(f"/proc/self/fd/{fd}") for fd in opened)  # the listing's own is closed by now


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
