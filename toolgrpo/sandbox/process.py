"""The confined process: forked, confined, warmed up, and waiting for code before it is needed.

Invariants: nothing of the model runs before `_confine` is done; the process holds no descriptor but its own five pipes;
it dies with its worker.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from dataclasses import dataclass
from typing import Any

import landlockpy

from toolgrpo.sandbox import child, judge
from toolgrpo.sandbox.base import Rung
from toolgrpo.sandbox.confine import SyscallRules, confine_files, confine_syscalls, die_with_parent, drop_privileges
from toolgrpo.sandbox.syscalls import syscall_filter
from toolgrpo.sandbox.wire import read_frame

__all__ = ["LIMITS_FROM_BIRTH", "Process", "kill", "start", "warm"]

LIMITS_FROM_BIRTH = ("memory_mb", "file_mb", "open_files")
_MOST_FDS = 1024  # more than a worker ever holds
_REQUESTS, _RESULTS = 3, 4  # where the process's two pipes of ours lie
_syscalls: SyscallRules | None = None


def warm(rung: str) -> None:
    """Build in the mother what every fork would otherwise build again."""
    global _syscalls
    if rung != Rung.UNSAFE:
        _syscalls = SyscallRules(syscall_filter(files=rung != Rung.SECCOMP))
    _ = judge  # grading runs it in a confined process, which on the seccomp rung could import nothing
    child.prepare_streams()


@dataclass(slots=True)
class Process:
    """A confined process and our ends of its pipes."""

    pid: int
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    requests: int
    results: int
    stopped: bool = False

    def is_dead(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def cpu_seconds(self) -> float:
        """Of all its threads, read from its own clock: /proc may belong to another pid namespace."""
        return time.clock_gettime(((~self.pid) << 3) | 2)

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def reap(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = -1
        return code

    def bury(self) -> None:
        """Wait for the end of a killed process and close what we hold of it."""
        if self.pid > 0:
            self.reap()
        self.close_stdin()
        for fd in (self.pidfd, self.stdout, self.stderr, self.requests, self.results):
            os.close(fd)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def start(settings: dict[str, Any], rules: landlockpy.Ruleset | None, scratch: str, limits: dict[str, int]) -> Process:
    """Fork a process that confines itself and then waits for code. `rules`: Landlock's, None where it has none."""
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
            _live()
        finally:
            os._exit(125)
    for fd in (stdin[0], stdout[1], stderr[1], requests[0], results[1]):
        os.close(fd)
    for fd in (stdin[1], stdout[0], stderr[0], requests[1], results[0]):
        os.set_blocking(fd, False)
    return Process(pid, os.pidfd_open(pid), stdin[1], stdout[0], stderr[0], requests[1], results[0])


def _confine(settings: dict[str, Any], rules: landlockpy.Ruleset | None, scratch: str, limits: dict[str, int]) -> None:
    """In the new process, before any of the model's code."""
    os.setsid()
    os.umask(0o077)
    os.chdir(scratch)
    for kind, most in (
        (resource.RLIMIT_AS, settings["mapped_bytes"] + (limits["memory_mb"] << 20)),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if settings["rung"] == Rung.UNSAFE:
        die_with_parent()
        _keep_own_descriptors()
        return
    drop_privileges(keep_reading=rules is not None and not settings["nobody_can_read"])
    die_with_parent()  # after the change of user, which clears it
    if rules is not None:
        confine_files(rules)
    _keep_own_descriptors()
    assert _syscalls is not None
    confine_syscalls(_syscalls)


def _keep_own_descriptors() -> None:
    """The two pipes to 3 and 4, where the channel to the client or the rules may lie until now; close the rest."""
    os.dup2(100, _REQUESTS)
    os.dup2(101, _RESULTS)
    os.closerange(5, _MOST_FDS)


def _live() -> None:
    """The confined process: one cell after the other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    namespace = child.fresh_namespace()
    child.use_streams()
    child.warm_up()
    while (request := read_frame(_REQUESTS)) is not None:
        if "expressions" in request:
            outcome = child.evaluate_all(request["expressions"], namespace)
        else:
            outcome = child.run_cell(request["code"], namespace)
        child.report(_RESULTS, outcome)
        if not request["keep"]:
            os._exit(outcome["exit_code"])
