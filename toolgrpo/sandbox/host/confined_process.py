"""The confined process: forked, confined, warmed up, and waiting for code before it is needed.

Forked by the forker (forker.py), from which it can inherit nothing worth reading: that process
reads no request.

Invariants: nothing of the model runs before `_confine` is done; the process holds no descriptor but
its own five pipes; it dies with its forker.
"""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import astuple, dataclass
from typing import Any

import landlockpy

from toolgrpo.processes.linux import die_with_parent
from toolgrpo.processes.wire import read_frame
from toolgrpo.sandbox.base import Rung
from toolgrpo.sandbox.inside import cells
from toolgrpo.sandbox.rungs.confine import SyscallRules, confine_files, confine_syscalls, drop_privileges
from toolgrpo.sandbox.rungs.syscalls import syscall_filter

_MOST_FDS = 1024  # more than a forker ever holds
# Of the user that runs are, in all runs together, until each is ended for its own (run_watch.py).
_MOST_THREADS_OF_ALL = 2048
_REQUESTS, _RESULTS = 3, 4  # where the process's two pipes of ours lie
_syscalls: SyscallRules | None = None


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What watches a confined process: its pidfd, and our ends of its pipes."""

    ended: int
    stdin: int
    stdout: int
    stderr: int
    requests: int
    results: int

    def close(self) -> None:
        for fd in astuple(self):
            os.close(fd)


def warm(rung: str) -> None:
    """Build in the host what every fork would otherwise build again."""
    global _syscalls
    _syscalls = SyscallRules(syscall_filter(files=rung != Rung.SECCOMP))
    cells.prepare_streams()


def fork_confined(
    settings: dict[str, Any], rules: landlockpy.Ruleset | None, scratch: str, limits: dict[str, int]
) -> tuple[int, Descriptors]:
    """Fork a process that confines itself and then waits for code.

    Return its pid and what watches it.

    `rules`: Landlock's, None where it has none.
    """
    os.environ["HOME"] = os.environ["TMPDIR"] = scratch  # here, not in the new process, where each page would be copied
    stdin, stdout, stderr, requests, results = (os.pipe() for _ in range(5))
    pid = os.fork()
    if pid == 0:
        try:
            for target, source in ((0, stdin[0]), (1, stdout[1]), (2, stderr[1])):
                os.dup2(source, target)
            os.dup2(requests[0], 100)
            os.dup2(results[1], 101)
            _confine(settings, rules, scratch, limits)
            _serve_cells()
        finally:
            os._exit(125)
    for fd in (stdin[0], stdout[1], stderr[1], requests[0], results[1]):
        os.close(fd)
    for fd in (stdin[1], stdout[0], stderr[0], requests[1], results[0]):
        os.set_blocking(fd, False)
    return pid, Descriptors(os.pidfd_open(pid), stdin[1], stdout[0], stderr[0], requests[1], results[0])


def _confine(settings: dict[str, Any], rules: landlockpy.Ruleset | None, scratch: str, limits: dict[str, int]) -> None:
    """Confine the new process, before any of the model's code."""
    os.setsid()
    os.umask(0o077)
    os.chdir(scratch)
    limits_of_kernel = [
        (resource.RLIMIT_AS, settings["mapped_bytes"] + (limits["memory_mb"] << 20)),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ]
    if os.getuid() == 0 or settings["rung"] == Rung.NAMESPACES:  # else it counts all that the user runs
        limits_of_kernel.append((resource.RLIMIT_NPROC, _MOST_THREADS_OF_ALL))
    for kind, most in limits_of_kernel:
        resource.setrlimit(kind, (most, most))
    drop_privileges(keep_reading=rules is not None and not settings["nobody_can_read"])
    die_with_parent()  # after the change of user, which clears it
    if rules is not None:
        confine_files(rules)
    _keep_own_descriptors()
    assert _syscalls is not None
    confine_syscalls(_syscalls)


def _keep_own_descriptors() -> None:
    """Move the two pipes to 3 and 4 and close the rest.

    Until now the forker's channel or the rules may lie there.
    """
    os.dup2(100, _REQUESTS)
    os.dup2(101, _RESULTS)
    os.closerange(5, _MOST_FDS)


def _serve_cells() -> None:
    """Run one cell after the other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    namespace = cells.fresh_namespace()
    cells.use_streams()
    cells.warm_up()
    while (request := read_frame(_REQUESTS)) is not None:
        cells.answer(request, namespace, cells.Pipes(_REQUESTS, _RESULTS))
