"""An interpreter without what only Linux has: `like_macos.py OWN_NAME -I -c CODE ARGUMENTS...`, called by a script that stands for it.

A simulation: the kernel below is Linux. What it shows is that nothing is imported, called or read that macOS lacks (the two
libraries, pidfds, epoll, clocks of other processes, prctl, /proc, /sys), and that no interpreter forks itself.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from typing import Any

LINUX_ONLY: tuple[tuple[Any, str], ...] = (
    (
        os,
        "pidfd_open memfd_create eventfd setns unshare sched_getaffinity sched_setaffinity splice getrandom O_PATH waitid",
    ),
    (os, "setresuid setresgid getresuid getresgid copy_file_range posix_fadvise fdatasync"),
    (signal, "pidfd_send_signal sigwaitinfo sigtimedwait"),
    (select, "epoll"),
    (resource, "prlimit"),
)


def pretend() -> None:
    sys.platform = "darwin"
    for module, names in LINUX_ONLY:
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("landlockpy", "seccompy"):
        sys.modules[name] = None  # type: ignore[assignment] # so that an import of it fails
    clock_gettime = time.clock_gettime

    def own_clocks_only(clock: int) -> float:
        if clock < 0:
            raise OSError(22, "no clock of another process")
        return clock_gettime(clock)

    time.clock_gettime = own_clocks_only
    sys.addaudithook(deny)


def deny(event: str, details: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(details[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "macOS has no such folder", details[0])
    if event == "os.fork":
        raise RuntimeError("forking is not safe on macOS")
    if event == "ctypes.dlsym" and details[1] in ("prctl", "unshare", "syscall", "capset"):
        raise AttributeError(f"macOS has no {details[1]}")


if __name__ == "__main__":
    own_name, isolated, option, code, *rest = sys.argv[1:]
    assert (isolated, option) == ("-I", "-c"), sys.argv
    sys.executable, sys.argv = own_name, ["-c", *rest]
    pretend()
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
