"""One worker: takes a request, has a waiting process run it, answers, and prepares the next process.

A run costs a fork before it and the end of a process after it; both cost more than the run. So the next process is forked
ahead, confined and waiting, and the last one ends after the answer, in a folder of its own, while the next is prepared.

Invariants: one request, one answer; when an answer is sent, every process of the run has been killed (a session's lives,
stopped, until its next run); a folder is used again only after its process is gone and the folder is empty; what waits
is a process that has run nothing. Trusted code: nothing of the model runs in this process. No process that runs code is
forked from this one, whose memory holds the requests of others: a `Way` is told limits and folders, never a request.
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
from toolgrpo.sandbox.host.run_process import Process, Way
from toolgrpo.sandbox.host.run_watch import answer, watch

__all__ = ["serve"]

_LIMITS_FROM_BIRTH = ("memory_mb", "file_mb", "open_files")


class _OutOfMemory(Exception):
    """The kernel killed the process that ran code, for want of memory."""


@dataclass(frozen=True, slots=True)
class _Room:
    """A scratch folder, and the rules that name it; both outlive many runs."""

    path: str
    rules: Any


@dataclass(slots=True)
class _Tenant:
    """A process in its room. `used`: code has run in it."""

    process: Process
    room: _Room
    limits: tuple[int, ...]
    used: bool = False


def serve(way: Way, channel: socket.socket, folder: str, limits: dict[str, Any]) -> None:
    """Answer requests until the client is gone. `limits` are those that most requests will have."""
    worker = _Worker(way, folder)
    try:
        worker.prepare(limits)
        while (request := receive(channel)) is not None:
            if "end_session" in request:
                worker.end_tenant()
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
    def __init__(self, way: Way, folder: str) -> None:
        self._way = way
        self._base = os.path.join(folder, f"w{os.getpid()}-{time.monotonic_ns()}-")
        self._rooms: list[_Room] = []
        self._free: list[_Room] = []
        self._built = 0
        self._tenant: _Tenant | None = None
        self._dying: list[_Tenant] = []

    def run(self, request: dict[str, Any], channel: socket.socket) -> bool:
        """Run a request and send its answer; whether its process is over."""
        started = time.monotonic()
        limits = _from_birth(request)
        waiting = self._tenant
        if waiting is not None and not waiting.used and (waiting.limits != limits or waiting.process.is_dead()):
            self.end_tenant()
        if self._tenant is None:
            self.prepare(request)
        tenant = self._tenant
        assert tenant is not None
        tenant.used = True
        outcome = watch(tenant.process, request, tenant.room.path, channel)
        over = outcome.gone or not request["keep"]
        if over:
            self._way.kill(tenant.process)
        else:  # threads of a session rest between runs
            tenant.process.stop()
        reply = answer(tenant.process, outcome, request)
        if reply["code"] == -signal.SIGKILL and self._way.was_out_of_memory():
            raise _OutOfMemory("the kernel killed a run because the machine, or its control group, had no memory left")
        if over:
            self._dying.append(tenant)
            self._tenant = None
        reply["duration"] = time.monotonic() - started
        send(channel, reply)
        return over

    def prepare(self, limits: dict[str, Any]) -> None:
        """Fork the next process; then see the last one off, which has ended meanwhile."""
        if self._tenant is None:
            room = self._free.pop() if self._free else self._build_room()
            born = _from_birth(limits)
            process = self._way.start(room.rules, room.path, dict(zip(_LIMITS_FROM_BIRTH, born, strict=True)))
            self._tenant = _Tenant(process, room, born)
        while self._dying:
            tenant = self._dying.pop()
            tenant.process.bury()
            try:
                scratch.empty(tenant.room.path)
                self._free.append(tenant.room)
            except FileNotFoundError:  # inside bubblewrap a run can move its folder away; it then has no second one
                self._rooms.remove(tenant.room)

    def end_tenant(self) -> None:
        """Kill the process that waits or belongs to a session."""
        if self._tenant is not None:
            self._way.kill(self._tenant.process)
            self._dying.append(self._tenant)
            self._tenant = None

    def close(self) -> None:
        self.end_tenant()
        for tenant in self._dying:
            tenant.process.bury()
        for room in self._rooms:
            scratch.remove(room.path)

    def _build_room(self) -> _Room:
        path = f"{self._base}{self._built}"
        self._built += 1
        # Built once: opening some fifteen paths costs more than the rest of the confinement together.
        room = _Room(path, self._way.furnish(path))
        self._rooms.append(room)
        return room


def _from_birth(limits: dict[str, Any]) -> tuple[int, ...]:
    """The limits that a process is born with."""
    return tuple(limits[name] for name in _LIMITS_FROM_BIRTH)
