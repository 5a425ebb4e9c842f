"""One worker: takes a request, has a waiting process run it, answers, prepares the next process.

A run costs a fork before it and the end of a process after it; both cost more than the run. So the
next process is forked ahead, confined and waiting, and the last one ends after the answer, in a
folder of its own, while the next is prepared.

Invariants: one request, one answer; when an answer is sent, every process of the run has been
killed (a session's lives, stopped, until its next run); a folder is used again only after its
process is gone and the folder is empty; what waits is a process that has run nothing. Trusted code:
nothing of the model runs in this process. No process that runs code is forked from this one, whose
memory holds the requests of others: a `Launcher` is told limits and folders, never a request.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from toolgrpo.processes.wire import receive, send
from toolgrpo.sandbox.host import scratch
from toolgrpo.sandbox.host.run_process import Launcher, Process
from toolgrpo.sandbox.host.run_watch import answer, watch

_LIMITS_FROM_BIRTH = ("memory_mb", "file_mb", "open_files")


class _OutOfMemory(Exception):
    """The kernel killed the process that ran code, for want of memory."""


@dataclass(frozen=True, slots=True)
class _ScratchFolder:
    """A scratch folder, and the rules that name it; both outlive many runs."""

    path: str
    rules: Any


@dataclass(slots=True)
class _Occupant:
    """The process that has a scratch folder. `used`: code has run in it."""

    process: Process
    folder: _ScratchFolder
    limits: tuple[int, ...]
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
        print(f"toolgrpo.sandbox: {error}", file=sys.stderr)
    except Exception:  # the same; the reason goes to stderr
        traceback.print_exc()
    finally:
        worker.close()


class _Worker:
    def __init__(self, launcher: Launcher, folder: str) -> None:
        self._launcher = launcher
        self._base = os.path.join(folder, f"w{os.getpid()}-{time.monotonic_ns()}-")
        self._folders: list[_ScratchFolder] = []
        self._free: list[_ScratchFolder] = []
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
        outcome = watch(occupant.process, request, occupant.folder.path, channel)
        over = outcome.gone or not request["keep"]
        if over:
            self._launcher.kill(occupant.process)
        else:  # threads of a session rest between runs
            occupant.process.stop()
        reply = answer(occupant.process, outcome, request)
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
            folder = self._free.pop() if self._free else self._build_folder()
            born = _from_birth(limits)
            process = self._launcher.start(folder.rules, folder.path, dict(zip(_LIMITS_FROM_BIRTH, born, strict=True)))
            self._occupant = _Occupant(process, folder, born)
        while self._dying:
            occupant = self._dying.pop()
            occupant.process.release()
            try:
                scratch.empty(occupant.folder.path)
                self._free.append(occupant.folder)
            except FileNotFoundError:  # an unconfined run can move its folder away
                self._folders.remove(occupant.folder)

    def end_occupant(self) -> None:
        """Kill the process that waits or belongs to a session."""
        if self._occupant is not None:
            self._launcher.kill(self._occupant.process)
            self._dying.append(self._occupant)
            self._occupant = None

    def close(self) -> None:
        self.end_occupant()
        for occupant in self._dying:
            occupant.process.release()
        for folder in self._folders:
            scratch.remove(folder.path)

    def _build_folder(self) -> _ScratchFolder:
        path = f"{self._base}{self._built}"
        self._built += 1
        # Built once: opening some fifteen paths costs more than the rest of the confinement
        # together.
        folder = _ScratchFolder(path, self._launcher.prepare_scratch(path))
        self._folders.append(folder)
        return folder


def _from_birth(limits: dict[str, Any]) -> tuple[int, ...]:
    """Return the limits that a process is born with."""
    return tuple(limits[name] for name in _LIMITS_FROM_BIRTH)
