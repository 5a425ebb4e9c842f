"""A kernel that kills for want of memory, for tests: its counter of such kills is a file of theirs, and they kill themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from process_tree import children_of, family_of, wait_for

from confined_python import Sandbox

_REST_S = 2.0

KILLS_ITSELF = """
import ctypes, time
libc = ctypes.CDLL(None)
event = (ctypes.c_int * 16)(0, 0, 9, 0)  # when the timer is due: signal 9
timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(0, 0, 0, 1000)), None) == 0
time.sleep(5)
"""


def rest(until: float) -> str:
    """The beginning of a program that has not ended before this time, however often it is run."""
    return f"import time\ntime.sleep(max(0.0, {until} - time.time()))\n"


def killed_while_it_runs(counter: Counter, sandbox: Sandbox, run: Callable[[str], None]) -> None:
    """Let the kernel kill a program that `run` has run; again where a busy machine let it end before that."""
    for _ in range(10):
        until = time.time() + _REST_S
        thread = threading.Thread(target=run, args=(rest(until),))
        thread.start()
        wait_for(lambda: len(sandbox._resting) < sandbox._workers)
        time.sleep(0.1)
        counter.count()
        for process in confined(sandbox):
            process.kill()
        in_time = time.time() < until
        thread.join()
        if in_time:
            return
    pytest.fail(f"ten programs ended before they could be killed, each after {_REST_S:g} s")


class Counter:
    """The file in which the kernel counts."""

    def __init__(self, file: Path) -> None:
        self._file, self._kills = file, 2
        self.count()

    def count(self) -> None:
        self._kills += 1
        self._file.write_text(f"nr_free_pages 5\noom_kill {self._kills}\npgfault 9\n")


def confined(sandbox: Sandbox) -> list[psutil.Process]:
    """The processes that run code or wait for it: those without a child."""
    return [psutil.Process(pid) for pid in family_of(sandbox._host.pid) if not children_of(pid)]
