"""Ask the machine which processes live, for tests of what must not stay behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _state(pid: int) -> str:
    """Return the letter that the kernel gives for what a process does; X if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that its parent has yet to collect."""
    return _state(pid) in "ZX"


def stop(pid: int) -> None:
    """Have a process stand still, so that it cannot act on what happens to another before it is killed itself."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _state(pid) in "TZX")


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


def ask_for_stacks(pid: int) -> None:
    """Have those below a process that registered SIGUSR1 with faulthandler print their stacks, and let them do it."""
    for below in family_of(pid):
        with suppress(OSError):
            caught = Path(f"/proc/{below}/status").read_text().partition("SigCgt:")[2].split()[0]
            if int(caught, 16) >> (signal.SIGUSR1 - 1) & 1:
                os.kill(below, signal.SIGUSR1)
    time.sleep(1.0)


def wait_for(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Return as soon as the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
