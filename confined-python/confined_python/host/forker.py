"""The forker: between a worker and the confined processes that run code, so that these inherit nothing
of any request.

A worker reads requests (other conversations' code, the tests of a task). They lie in its frames
and, once dropped, in its freed memory, and a process that it forked would have all of that. So
before its first request a worker forks one process, the forker, which forks on its behalf and is
told nothing but folders, limits and process numbers. A request goes from the worker's pipe straight
into the process that runs it, which was forked, confined and warmed up before it is needed.

Invariants: the forker holds no end of the client's channel and reads no request; on the rung
`namespaces` it is the first process of a process table of its own, so that all it forks goes with
it; it dies with its worker. Nothing of the model runs before `_confine` is done; the confined process
holds no descriptor but its own five pipes; it dies with its forker.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import landlockpy

from confined_python.base import NOBODY, Rung
from confined_python.host.confine import (
    SyscallRules,
    confine_files,
    confine_syscalls,
    drop_privileges,
    enter_pid_namespace,
    file_rules,
    syscall_filter,
)
from confined_python.host.run_process import Launcher, Process, kernel_limits, open_pipes
from confined_python.host.scratch import make
from confined_python.inside import cells
from confined_python.processes.linux import die_with_parent, limit
from confined_python.processes.wire import receive, send

_MESSAGE_BYTES = 4096  # more than a process number in JSON
_MOST_FDS = 1024  # more than a forker ever holds
# Of the user that runs are, in all runs together, until each is ended for its own (run_worker.py).
_MOST_THREADS_OF_ALL = 2048
_REQUESTS, _RESULTS = 3, 4  # where a confined process's two pipes of ours lie
_syscalls: SyscallRules | None = None


def warm(rung: str) -> None:
    """Build in the host what every fork would otherwise build again."""
    global _syscalls
    _syscalls = SyscallRules(syscall_filter(files=rung != Rung.SECCOMP))
    cells.prepare_streams()


class ForkLauncher(Launcher):
    """Processes forked by the forker of the worker that uses them, confined as the rung says."""

    def __init__(self, settings: dict[str, Any], channel: socket.socket) -> None:
        """Fork the forker; to be called before anything was read from `channel`."""
        self._vmstat, self._proc = settings["vmstat"], settings["proc"]
        self._oom_kills = _oom_kills(self._vmstat)
        self._new = -1
        self._forker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if settings["rung"] == Rung.NAMESPACES:
            enter_pid_namespace()
        if os.fork() == 0:
            channel.close()
            self._forker.close()
            _serve(settings, theirs)
        theirs.close()

    def prepare_scratch(self, path: str) -> None:
        make(path, NOBODY if os.getuid() == 0 else None)
        self._ask({"prepare_scratch": path})

    def start(self, path: str, limits: dict[str, int]) -> Process:
        send(self._forker, {"start": path, "limits": limits})
        message, fds, _, _ = socket.recv_fds(self._forker, _MESSAGE_BYTES, 6)
        if not message:
            raise RuntimeError("the process that forks for a sandbox worker is gone")
        self._new = json.loads(message)
        return Process(self, self._new, *fds, proc=self._proc)

    def kill(self, pid: int) -> None:
        with suppress(OSError):  # with the forker all that it forked is gone
            self._ask({"kill": pid})

    def cpu_seconds(self, pid: int) -> float:
        if pid == self._new:  # asked at the start of its first run, which need not wait: it has used a few milliseconds
            self._new = -1
            return 0.0
        return float(self._ask({"clock": pid}))

    def reap(self, pid: int) -> int:
        try:
            return int(self._ask({"reap": pid}))
        except OSError:
            return -signal.SIGKILL

    def was_out_of_memory(self) -> bool:
        before, self._oom_kills = self._oom_kills, _oom_kills(self._vmstat)
        return bool(self._oom_kills != before)

    def _ask(self, message: dict[str, Any]) -> Any:
        send(self._forker, message)
        answer = receive(self._forker)
        if answer is None:
            raise ConnectionError("the process that forks for a sandbox worker is gone")
        return answer


def _oom_kills(vmstat: int | None) -> int | None:
    """Return how many processes the kernel has killed for want of memory, on this machine and in all its
    control groups; None where `vmstat`, /proc/vmstat opened, is not there or does not say.
    """
    if vmstat is None:
        return None
    counts = dict(line.split() for line in os.pread(vmstat, 1 << 16, 0).splitlines())
    return int(counts[b"oom_kill"]) if b"oom_kill" in counts else None


def _serve(settings: dict[str, Any], worker: socket.socket) -> NoReturn:
    """Fork, kill and wait for processes until the worker is gone; does not return."""
    rules: dict[str, landlockpy.Ruleset | None] = {}
    with_landlock = settings["rung"] in (Rung.NAMESPACES, Rung.LANDLOCK)
    try:
        die_with_parent()
        while (message := receive(worker)) is not None:
            match message:
                case {"prepare_scratch": str(scratch)}:
                    rules[scratch] = file_rules(settings["readable"], scratch) if with_landlock else None
                    send(worker, True)
                case {"start": str(scratch), "limits": dict(limits)}:
                    pid, *fds = _fork_confined(settings, rules[scratch], scratch, limits)
                    socket.send_fds(worker, [json.dumps(pid).encode()], fds)
                    for fd in fds:
                        os.close(fd)
                case {"kill": int(pid)}:
                    _kill(pid)
                    if settings["rung"] == Rung.NAMESPACES:
                        _kill(-1)
                    send(worker, True)
                case {"clock": int(pid)}:
                    send(worker, time.clock_gettime(((~pid) << 3) | 2))  # /proc may belong to another process table
                case {"reap": int(pid)}:
                    send(worker, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except (BrokenPipeError, ConnectionResetError):  # the worker has gone
        pass
    except BaseException:  # the worker sees a lost forker; the reason goes to stderr
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork_confined(
    settings: dict[str, Any], rules: landlockpy.Ruleset | None, scratch: str, limits: dict[str, int]
) -> tuple[int, ...]:
    """Fork a process that confines itself and then waits for code; return its pid, its pidfd, and our ends of
    its pipes. `rules`: Landlock's, None where it has none.
    """
    os.environ["HOME"] = os.environ["TMPDIR"] = scratch  # here, not in the new process, where each page would be copied
    ours, theirs = open_pipes()
    pid = os.fork()
    if pid == 0:
        try:
            for target, source in zip((0, 1, 2, 100, 101), theirs, strict=True):
                os.dup2(source, target)
            _confine(settings, rules, scratch, limits)
            cells.serve(_REQUESTS, _RESULTS)
        finally:
            os._exit(125)
    for fd in theirs:
        os.close(fd)
    return pid, os.pidfd_open(pid), *ours


def _confine(settings: dict[str, Any], rules: landlockpy.Ruleset | None, scratch: str, limits: dict[str, int]) -> None:
    """Confine the new process, before any of the model's code."""
    os.setsid()
    os.umask(0o077)
    os.chdir(scratch)
    for kind, most in kernel_limits(limits, settings["mapped_bytes"]):
        limit(kind, most)
    if os.getuid() == 0 or settings["rung"] == Rung.NAMESPACES:  # else it counts all that the user runs
        limit(resource.RLIMIT_NPROC, _MOST_THREADS_OF_ALL)
    drop_privileges(keep_reading=rules is not None and not settings["nobody_can_read"])
    die_with_parent()  # after the change of user, which clears it
    if rules is not None:
        confine_files(rules)
    # Until now the forker's channel or the rules may lie there.
    os.dup2(100, _REQUESTS)
    os.dup2(101, _RESULTS)
    os.closerange(5, _MOST_FDS)
    assert _syscalls is not None
    confine_syscalls(_syscalls)
