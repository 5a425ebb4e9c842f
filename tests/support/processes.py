"""Ask the machine which processes live, for tests of what must not stay behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that its parent has yet to collect."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def all_end(*pids: int, timeout_s: float = 120.0) -> bool:
    """Return whether these processes end; those that were just killed may take a moment."""
    deadline = time.monotonic() + timeout_s
    while not all(has_ended(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children_of(pid: int) -> list[int]:
    """Return the children of a process, or none if it is gone."""
    with suppress(OSError):
        return [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    return []


def family_of(pid: int) -> list[int]:
    """Return a process and everything below it."""
    return [pid, *(below for child in children_of(pid) for below in family_of(child))]


def wait_for(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Return as soon as the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
