"""One worker: takes a request, has a waiting process run it, answers, prepares the next process.

A run costs a fork before it and the end of a process after it; both cost more than the run. So the
next process is forked ahead, confined and waiting, and the last one ends after the answer, in a
folder of its own, while the next is prepared.

Invariants: one request, one answer; when an answer is sent, every process of the run has been
killed (a session's lives, stopped, until its next run); a folder is used again only after its
process is gone and the folder is empty; what waits is a process that has run nothing. Trusted code:
nothing of the model runs in this process, and nothing that comes out of one that runs it is read
as more than bytes here; what is kept of a run is bounded, however much it writes. No process that runs code is forked from this one, whose
memory holds the requests of others: a `Launcher` is told limits and folders, never a request.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from confined_python.base import shown
from confined_python.host import scratch
from confined_python.host.run_process import Launcher, Process
from confined_python.processes.wire import pack, receive, send

_LIMITS_FROM_BIRTH = ("memory_mb", "file_mb", "open_files")
_MOST_BYTES = 4 << 20  # of a result or of one output stream; more ends the run
_MOST_OF_A_CALL = 16 << 20  # of what a judge asks and is answered: the arguments of a test may be long
_JOB = ("code", "call", "suite", "came", "keep", "timeout_s")  # what the process is told
_CHECK_S = 0.1  # between looks at the CPU time used, the threads and the scratch folder
_MOST_THREADS = 256


class _OutOfMemory(Exception):
    """The kernel killed the process that ran code, for want of memory."""


@dataclass(slots=True)
class _Occupant:
    """The process that has a scratch folder. `used`: code has run in it."""

    process: Process
    folder: str
    limits: dict[str, int]
    used: bool = False


def serve(launcher: Launcher, channel: socket.socket, folder: str, limits: dict[str, Any]) -> None:
    """Answer requests until the client is gone. `limits` are those that most requests will have."""
    worker = _Worker(launcher, folder)
    try:
        worker.prepare(limits)
        while (request := receive(channel)) is not None:
            if "end_session" in request:
                worker.end_occupant()
                worker.prepare(limits)
                continue
            over = worker.run(request, channel)
            if over:
                worker.prepare(request)
    except (BrokenPipeError, ConnectionResetError):  # the client has gone while its answer was made
        return
    except _OutOfMemory as error:  # the client sees a lost worker, as when the kernel takes the worker itself
        print(f"confined_python: {error}", file=sys.stderr)
    except Exception:  # the same; the reason goes to stderr
        traceback.print_exc()
    finally:
        worker.close()
        channel.close()


class _Worker:
    def __init__(self, launcher: Launcher, folder: str) -> None:
        self._launcher = launcher
        self._base = os.path.join(folder, f"{scratch.prefix_of(os.getpid())}{time.monotonic_ns()}-")
        # Each is prepared once for many runs: rules that name it open some fifteen paths, which costs more
        # than the rest of the confinement together.
        self._folders: set[str] = set()
        self._free: list[str] = []
        self._built = 0
        self._occupant: _Occupant | None = None
        self._dying: list[_Occupant] = []

    def run(self, request: dict[str, Any], channel: socket.socket) -> bool:
        """Run a request and send its answer; return whether its process is over."""
        started = time.monotonic()
        limits = _from_birth(request)
        waiting = self._occupant
        if waiting is not None and not waiting.used and (waiting.limits != limits or waiting.process.is_dead()):
            self.end_occupant()
        if self._occupant is None:
            self.prepare(request)
        occupant = self._occupant
        assert occupant is not None
        occupant.used = True
        run = Run(occupant.process, request, occupant.folder)
        run.watch(channel)
        over = run.gone or not request["keep"]
        if over:
            occupant.process.kill()
        else:  # threads of a session rest between runs
            occupant.process.stop()
        reply = run.answer()
        if reply["code"] == -signal.SIGKILL and self._launcher.was_out_of_memory():
            raise _OutOfMemory("the kernel killed a run because the machine, or its control group, had no memory left")
        if over:
            self._dying.append(occupant)
            self._occupant = None
        reply["duration"] = time.monotonic() - started
        send(channel, reply)
        return over

    def prepare(self, limits: dict[str, Any]) -> None:
        """Start the next process; then release the last one, which has ended meanwhile."""
        if self._occupant is None:
            if not self._free:
                self._free.append(f"{self._base}{self._built}")
                self._built += 1
                self._folders.add(self._free[0])
                self._launcher.prepare_scratch(self._free[0])
            folder, born = self._free.pop(), _from_birth(limits)
            self._occupant = _Occupant(self._launcher.start(folder, born), folder, born)
        while self._dying:
            occupant = self._dying.pop()
            occupant.process.release()
            try:
                scratch.empty(occupant.folder)
                self._free.append(occupant.folder)
            except FileNotFoundError:  # an unconfined run can move its folder away
                self._folders.remove(occupant.folder)

    def end_occupant(self) -> None:
        """Kill the process that waits or belongs to a session."""
        if self._occupant is not None:
            self._occupant.process.kill()
            self._dying.append(self._occupant)
            self._occupant = None

    def close(self) -> None:
        self.end_occupant()
        for occupant in self._dying:
            occupant.process.release()
        for folder in self._folders:
            scratch.remove(folder)


def _from_birth(limits: dict[str, Any]) -> dict[str, int]:
    """Return the limits that a process is born with."""
    return {name: limits[name] for name in _LIMITS_FROM_BIRTH}


class Run:
    """One run in a live process: what came out of it so far, and the verdict of the limit that ended it."""

    def __init__(self, process: Process, request: dict[str, Any], folder: str) -> None:
        self._process, self._request, self._folder = process, request, folder
        self._held = {fd: bytearray() for fd in (process.stdout, process.stderr, process.results)}
        job = {key: request[key] for key in _JOB if key in request}
        self._inputs = {process.requests: memoryview(pack(job))}
        if process.stdin >= 0:  # closed after a session's first run
            self._inputs[process.stdin] = memoryview(request["stdin"].encode(errors="replace"))
        self._most_of_results = _MOST_BYTES if "code" in request else _MOST_OF_A_CALL
        self._poller = select.poll()
        self._verdict: str | None = None
        self._exited = False  # the process ended by itself

    @property
    def gone(self) -> bool:
        """Return whether the process has ended or has to."""
        return self._exited or self._verdict is not None

    def watch(self, client: socket.socket) -> None:
        """Hand the request to the process and move bytes until its result, its end, a limit, or the client's end."""
        process, timeout_s = self._process, self._request["timeout_s"]
        if process.stopped:
            process.go_on()
        for fd in (*self._held, process.ended, client.fileno()):
            self._poller.register(fd, select.POLLIN)
        for fd in list(self._inputs):  # what fits into the pipes goes now
            self._poller.register(fd, select.POLLOUT)
            self._feed(fd)
        deadline, next_check = time.monotonic() + timeout_s, time.monotonic() + _CHECK_S
        cpu_deadline_s = process.cpu_seconds() + timeout_s
        while not self.gone and not self._is_complete():
            now = time.monotonic()
            if now >= deadline:
                self._verdict = "timeout"
            elif now >= next_check:
                next_check = now + _CHECK_S
                self._verdict = self._passed_limit(cpu_deadline_s)
            else:
                for fd, event in self._poller.poll(max(1.0, 1000 * (min(deadline, next_check) - now))):
                    self._take(fd, event, client.fileno())

    def answer(self) -> dict[str, Any]:
        """Return the run in the words of the client, once nothing of it executes any more.

        The frame is passed on unread, as the stranger's text it is.
        """
        for fd, held in self._held.items():  # what is left in the pipes
            before = -1
            while self._verdict != "output" and before != len(held):
                before = len(held)
                self._collect(fd)
        code = self._process.reap() if self._exited else None
        if code == -signal.SIGXCPU:
            self._verdict = "timeout"
        stdout, stderr, results = self._held.values()
        frame = results[4 : 4 + int.from_bytes(results[:4], "big")] if self._is_complete() else b""
        return {
            "verdict": self._verdict,
            "code": code,
            "frame": frame.decode("latin-1"),
            "stdout": shown(stdout.decode("utf-8", "replace"), self._request["output_chars"]),
            "stderr": shown(stderr.decode("utf-8", "replace"), self._request["output_chars"]),
            "state_lost": self._request["keep"] and self.gone,
        }

    def _take(self, fd: int, event: int, client: int) -> None:
        if fd == self._process.ended:
            self._exited = True
        elif fd == client:
            self._verdict = "abandoned"
        elif fd in self._inputs:
            self._feed(fd)
        elif not self._collect(fd) or event == select.POLLHUP:
            self._poller.unregister(fd)

    def _passed_limit(self, cpu_deadline_s: float) -> str | None:
        """Return the verdict on a run that uses too much of what no limit of the kernel bounds."""
        if self._process.cpu_seconds() > cpu_deadline_s:
            return "timeout"
        if self._process.threads() > _MOST_THREADS:
            self._held[self._process.stderr] += b"\n[ended: more than %d threads at a time]\n" % _MOST_THREADS
            return "memory"
        without_name = self._process.unlinked_bytes(self._request["file_mb"] << 20)
        if scratch.holds_more_than(self._folder, (self._request["scratch_mb"] << 20) - without_name):
            return "disk"
        return None

    def _feed(self, fd: int) -> None:
        left = self._inputs[fd]
        try:
            left = left[os.write(fd, left) :] if left else left
        except BlockingIOError:
            return
        except BrokenPipeError:
            left = left[:0]
        self._inputs[fd] = left
        if not left:
            self._poller.unregister(fd)
            del self._inputs[fd]
            if fd == self._process.stdin:
                self._process.close_stdin()

    def _collect(self, fd: int) -> bool:
        """Read what is there; False when nothing can come any more."""
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        self._held[fd] += part
        if len(self._held[fd]) > (self._most_of_results if fd == self._process.results else _MOST_BYTES):
            self._verdict = "output"
        return bool(part)

    def _is_complete(self) -> bool:
        results = self._held[self._process.results]
        return len(results) >= 4 and len(results) >= 4 + int.from_bytes(results[:4], "big")
