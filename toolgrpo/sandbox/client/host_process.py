"""The sandbox's processes on our side: started by exec with a clean environment, asked for workers,
closed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from toolgrpo.errors import SandboxError
from toolgrpo.processes.wire import hang_up
from toolgrpo.sandbox.base import Rung
from toolgrpo.sandbox.host import scratch
from toolgrpo.sandbox.paths import interpreter_paths, open_to_all, starter

VMSTAT = Path("/proc/vmstat")  # where the kernel counts the processes that it has killed for want of memory
_START_S = 60.0
_CLOSE_S = 10.0
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "PATH": "",
}


class Workers(Protocol):
    """Where a sandbox gets its workers."""

    def worker(self) -> socket.socket:
        """Return a channel to a new worker."""

    def close(self) -> None:
        """End all of them, now that their channels are closed, and remove what they leave."""


class Host:
    """The host process, seen from the client.

    `limits` are those that its workers expect a run to have.
    """

    def __init__(self, rung: Rung, *, preload: list[str], limits: dict[str, Any]) -> None:
        readable = interpreter_paths()
        parent = tempfile.gettempdir()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        owner, proc = os.pidfd_open(os.getpid()), os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        vmstat = _open_vmstat()
        lent = [fd for fd in (theirs.fileno(), owner, proc, vmstat) if fd is not None]
        settings: dict[str, Any] = {
            "rung": rung.value,
            "preload": preload,
            "limits": limits,
            "tmp": parent,
            "readable": readable,
            "nobody_can_read": all(open_to_all(path) for path in (*readable, f"{parent}/any")),
            "control": theirs.fileno(),
            "owner": owner,
            "proc": proc,
            "vmstat": vmstat,
        }
        command = [sys.executable, "-I", "-c", starter("host.host", "main"), json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                command,
                env=_ENVIRONMENT,
                pass_fds=lent,
                cwd="/",
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.detach()
            for fd in lent:
                os.close(fd)
        self.scratch: str | None = None
        self._control.settimeout(_START_S)
        try:
            hello = self._control.makefile("rb").readline()
        except OSError:
            hello = b""
        if not hello:
            self.close()
            raise SandboxError("the sandbox's host process did not start; its own words are on stderr above")
        greeting = json.loads(hello)
        self.missing: list[str] = greeting["missing"]
        self.scratch = greeting["scratch"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def worker(self) -> socket.socket:
        """Return a channel to a new worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's host process is gone ({error}); open another sandbox") from None
        finally:
            theirs.close()
        return ours

    def close(self) -> None:
        """Have the host end its workers, remove the scratch folder and end.

        What a dead host left is removed here.
        """
        hang_up(self._control)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.scratch is not None:
            with suppress(OSError):
                scratch.remove(self.scratch)


def _open_vmstat() -> int | None:
    with suppress(OSError):  # no /proc, or one that shows less
        return os.open(VMSTAT, os.O_RDONLY)
    return None


class UnconfinedWorkers:
    """Workers that need nothing of Linux and confine nothing, each started by itself.

    `limits` as the host's.
    """

    def __init__(self, *, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._workers: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def worker(self) -> socket.socket:
        """Return a channel to a new worker; one that cannot start is a lost one to who asks it."""
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = {
            "channel": theirs.fileno(),
            "opener": os.getpid(),
            "tmp": tempfile.gettempdir(),
            "limits": self._limits,
        }
        try:
            started = subprocess.Popen(
                [sys.executable, "-I", "-c", starter("host.unconfined_worker", "main"), json.dumps(settings)],
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                cwd="/",
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"a sandbox worker could not be started: {error}") from None
        finally:
            theirs.close()
        self._workers.append(started)
        return ours

    def close(self) -> None:
        """Wait for the workers, whose channels are closed."""
        for worker in self._workers:
            try:
                worker.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
