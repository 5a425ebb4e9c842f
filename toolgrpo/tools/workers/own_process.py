"""What a supervisor and a worker do to themselves and to processes below them, each with a harmless
fallback off Linux.

Not covered off Linux: a tool's children that leave their process group outlive it there.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_CLONE_FS = 0x200
_LEAVING_S = 0.2
_LINUX = sys.platform == "linux"


def own_directory_per_thread() -> bool:
    """Give the calling thread a working directory and umask of its own; True if that worked."""
    return _LINUX and ctypes.CDLL(None).unshare(_CLONE_FS) == 0


def offer_to_oom_killer(score: int) -> None:
    """Have the kernel kill this process before the trainer when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def limit_memory(megabytes: int) -> None:
    """Set an address-space limit (0: none), and allow no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes > 0:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = megabytes * 1024 * 1024
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def kill_group(pid: int) -> None:
    """Kill a process and its group."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def open_descriptors() -> set[int]:
    """Return the descriptors that are open, without the standard three."""
    return {int(name) for name in _names("/proc/self/fd") if int(name) > 2}


def forkable(descriptors_before: set[int]) -> bool:
    """Return whether this process may be forked safely.

    It may with one thread, and nothing opened since `descriptors_before`.
    """
    if not _LINUX or not _is_one_thread():
        return False
    opened = open_descriptors() - descriptors_before
    return not any(os.path.lexists(f"/proc/self/fd/{fd}") for fd in opened)  # the listing's own is closed by now


def _is_one_thread() -> bool:
    """Return whether no other thread runs; one that was joined is listed for a moment longer."""
    give_up = time.monotonic() + _LEAVING_S
    while len(_names("/proc/self/task")) != 1:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
