"""The host's memory, made cheap to fork, and the machine's.

What a run costs is mostly the copying and dropping of page tables. /proc is reached through
descriptors that the client has opened.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator

_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def collapse_heap(proc: int) -> int:
    """Merge this process's heap into huge pages; return how many.

    None are merged where the kernel is older than 6.1 or refuses, which is only slower.

    With numpy and sympy imported this halves what a fork and its end cost.
    """
    done = 0
    for first, last in list(_heap(proc)):
        for address in range(first, last, _HUGE):
            done += _libc.madvise(address, _HUGE, _MADV_COLLAPSE) == 0
    return done


def mapped_bytes(proc: int) -> int:
    """Return the size of this process's address space."""
    return int(_read(proc, "self/statm").split()[0]) * resource.getpagesize()


def oom_kills(vmstat: int | None) -> int | None:
    """Return how many processes the kernel has killed for want of memory.

    Counted over this machine and all its control groups. `vmstat`: /proc/vmstat, opened. None
    where there is none, or where it does not say.
    """
    if vmstat is None:
        return None
    for line in os.pread(vmstat, 1 << 16, 0).splitlines():
        name, _, count = line.partition(b" ")
        if name == b"oom_kill":
            return int(count)
    return None


def _heap(proc: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of the heap that could be whole huge pages."""
    for line in _read(proc, "self/maps").splitlines():
        span, rights, *rest = line.split()
        if rights == "rw-p" and (len(rest) < 4 or rest[3] == "[heap]"):
            first, last = (int(edge, 16) for edge in span.split("-"))
            yield -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE


def _read(proc: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=proc), encoding="utf-8", errors="replace") as file:
        return file.read()
