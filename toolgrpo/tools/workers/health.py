"""Check a worker's process after a call: put it right, or say why it must be replaced.

Checked after each call and before the next one begins. Each look costs some microseconds: counts
are compared, never lists. What is bounded is measured from the worker's birth, so that a plugin
whose import takes much is not replaced for it.

Not covered: the contents of other modules, environment variables, signal handlers, locales, threads
that are not Python's.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

_SPENT = 0.9  # of what was free at birth: descriptors, and address space where it is limited
_STRAY_DESCRIPTORS = 4096  # where the limit is higher: what leaks takes the machine's memory too
_STRAY_THREADS = 128  # beyond those that run calls
_NAMES = ("NOFILE", "AS", "DATA", "FSIZE", "STACK", "CPU", "NPROC")
_LIMITS = tuple(getattr(resource, f"RLIMIT_{name}") for name in _NAMES if hasattr(resource, f"RLIMIT_{name}"))
_Limits = dict[int, tuple[int, int]]


@cache
def what_is_loaded() -> tuple[Mapping[str, Any], Mapping[str, ModuleType]]:
    """Return the builtins and modules when this was first asked: before a fork, for what is forked.

    Each worker's own list of them would have it copy the pages of all modules.
    """
    return dict(vars(builtins)), dict(sys.modules)


class Health:
    """The resources of a worker at its start, and what is left of them. `threads`: how many run calls."""

    def __init__(self, threads: int) -> None:
        self._builtins, self._modules_then = what_is_loaded()
        self._modules = sys.modules
        self._folder = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._limits: _Limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
        self._most_threads = threading.active_count() + threads + _STRAY_THREADS
        first_free, most = _first_free_descriptor(), self._limits[resource.RLIMIT_NOFILE][0]
        self._last_descriptor = first_free + min(_SPENT * (most - first_free), _STRAY_DESCRIPTORS)
        mapped, room = _mapped_bytes(), self._limits[resource.RLIMIT_AS][0]
        self._most_bytes = None if room == resource.RLIM_INFINITY else mapped + _SPENT * (room - mapped)

    def restore(self) -> str | None:
        """Put back what a call must leave as it was; what fellow calls may have met meanwhile."""
        complaint = self._restore_builtins()  # first: all the rest needs them
        if sys.modules is not self._modules or len(sys.modules) < len(self._modules_then):
            sys.modules = self._modules
            for name, module in self._modules_then.items():
                sys.modules.setdefault(name, module)
            complaint = "a call removed modules"
        for kind, before in self._limits.items():
            if resource.getrlimit(kind) != before:
                with suppress(OSError, ValueError):  # a hard limit that was lowered stays lowered, but for root
                    resource.setrlimit(kind, before)
                complaint = "a call changed the limits of the process"
        with suppress(OSError):
            if os.getcwd() != self._folder:
                os.chdir(self._folder)
        os.umask(self._umask)
        return complaint

    def complaint(self) -> str | None:
        """Return what is nearly spent, if anything is."""
        if _first_free_descriptor() >= self._last_descriptor:
            return "its descriptors are nearly spent"
        if threading.active_count() > self._most_threads:
            return "calls left many threads behind"
        if self._most_bytes is not None and _mapped_bytes() > self._most_bytes:
            return "its memory is nearly spent"
        return None

    def _restore_builtins(self) -> str | None:
        now = builtins.__dict__
        replaced = False
        for name, value in self._builtins.items():
            if name not in now or now[name] is not value:
                now[name] = value
                replaced = replaced or name != "_"
        return "a call replaced builtins" if replaced else None


def _first_free_descriptor() -> float:
    """Return the number that the next file gets, the lowest free one.

    The limit is one of numbers.
    """
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return float("inf")
    os.close(descriptor)
    return descriptor


def _mapped_bytes() -> int:
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(descriptor, 4096).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)
