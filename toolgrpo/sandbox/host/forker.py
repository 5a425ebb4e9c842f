"""The forker: between a worker and the processes that run code, so that these inherit nothing of
any request.

A worker reads requests (other conversations' code, the tests of a task). They lie in its frames
and, once dropped, in its freed memory, and a process that it forked would have all of that. So
before its first request a worker forks one process, the forker, which forks on its behalf and is
told nothing but folders, limits and process numbers. A request goes from the worker's pipe straight
into the process that runs it.

Invariants: the forker holds no end of the client's channel and reads no request; on the rung
`namespaces` it is the first process of a process table of its own, so that all it forks goes with
it; it dies with its worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import astuple
from typing import Any, NoReturn

import landlockpy

from toolgrpo.processes.linux import die_with_parent
from toolgrpo.processes.wire import receive, send
from toolgrpo.sandbox.base import NOBODY, Rung
from toolgrpo.sandbox.host.confined_process import Descriptors, fork_confined
from toolgrpo.sandbox.host.kernel_memory import oom_kills
from toolgrpo.sandbox.host.run_process import Process
from toolgrpo.sandbox.host.scratch import make
from toolgrpo.sandbox.rungs.confine import enter_pid_namespace, file_rules

_MESSAGE_BYTES = 4096  # more than a process number in JSON


class ForkLauncher:
    """Processes forked by the forker of the worker that uses them, confined as the rung says."""

    def __init__(self, settings: dict[str, Any], channel: socket.socket) -> None:
        """Fork the forker; to be called before anything was read from `channel`."""
        self._vmstat, self._proc = settings["vmstat"], settings["proc"]
        self._oom_kills = oom_kills(self._vmstat)
        self._forker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if settings["rung"] == Rung.NAMESPACES:
            enter_pid_namespace()
        if os.fork() == 0:
            channel.close()
            self._forker.close()
            _serve(settings, theirs)
        theirs.close()

    def prepare_scratch(self, scratch: str) -> str:
        make(scratch, NOBODY if os.getuid() == 0 else None)
        self._ask({"prepare_scratch": scratch})
        return scratch

    def start(self, rules: str, scratch: str, limits: dict[str, int]) -> Process:
        send(self._forker, {"start": rules, "limits": limits})
        message, fds, _, _ = socket.recv_fds(self._forker, _MESSAGE_BYTES, len(Descriptors.__slots__))
        if not message:
            raise RuntimeError("the process that forks for a sandbox worker is gone")
        process = ForkedProcess(json.loads(message), Descriptors(*fds), self)
        process.proc = self._proc
        return process

    def kill(self, process: Process) -> None:
        if process.pid > 0:
            with suppress(OSError):  # with the forker all that it forked is gone
                self._ask({"kill": process.pid})

    def cpu_seconds(self, pid: int) -> float:
        """Return the CPU time of a process that the forker has not waited for."""
        return float(self._ask({"clock": pid}))

    def reap(self, pid: int) -> int:
        """Wait for a process that has ended or was killed; return its exit code."""
        try:
            return int(self._ask({"reap": pid}))
        except OSError:
            return -signal.SIGKILL

    def was_out_of_memory(self) -> bool:
        before, self._oom_kills = self._oom_kills, oom_kills(self._vmstat)
        return bool(self._oom_kills != before)

    def _ask(self, message: dict[str, Any]) -> Any:
        send(self._forker, message)
        answer = receive(self._forker)
        if answer is None:
            raise ConnectionError("the process that forks for a sandbox worker is gone")
        return answer


class ForkedProcess(Process):
    """A forked process, watched through a pidfd.

    `pid` is its number in the forker's process table, which may be another than the worker's.
    """

    __slots__ = ("_is_new", "_launcher")

    def __init__(self, pid: int, held: Descriptors, launcher: ForkLauncher) -> None:
        super().__init__(pid, *astuple(held))
        self._launcher, self._is_new = launcher, True

    def cpu_seconds(self) -> float:
        if self._is_new:  # asked at the start of its first run, which need not wait: it has used a few milliseconds
            self._is_new = False
            return 0.0
        return self._launcher.cpu_seconds(self.pid)

    def reap(self) -> int:
        pid, self.pid = self.pid, -1
        return self._launcher.reap(pid)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(self.ended, number)


def _serve(settings: dict[str, Any], worker: socket.socket) -> NoReturn:
    """Fork, kill and wait for processes until the worker is gone; does not return."""
    rules: dict[str, landlockpy.Ruleset | None] = {}
    try:
        die_with_parent()
        while (message := receive(worker)) is not None:
            match message:
                case {"prepare_scratch": str(scratch)}:
                    rules[scratch] = _rules(settings, scratch)
                    send(worker, True)
                case {"start": str(scratch), "limits": dict(limits)}:
                    pid, held = fork_confined(settings, rules[scratch], scratch, limits)
                    socket.send_fds(worker, [json.dumps(pid).encode()], astuple(held))
                    held.close()
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


def _rules(settings: dict[str, Any], scratch: str) -> landlockpy.Ruleset | None:
    with_landlock = settings["rung"] in (Rung.NAMESPACES, Rung.LANDLOCK)
    return file_rules(settings["readable"], scratch) if with_landlock else None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
