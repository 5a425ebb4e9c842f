"""The mother process on our side: started by exec with a clean environment, asked for workers, closed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

from toolgrpo.errors import SandboxError
from toolgrpo.sandbox.base import Rung
from toolgrpo.sandbox.bubblewrap import SCRATCH_PARENT, wrap
from toolgrpo.sandbox.paths import interpreter_paths, open_to_all, starter

__all__ = ["Mother"]

_START_S = 60.0
_CLOSE_S = 10.0
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "PATH": "",
}


class Mother:
    """The mother process, seen from the client. `limits` are those that its workers expect a run to have."""

    def __init__(self, rung: Rung, *, preload: list[str], limits: dict[str, Any]) -> None:
        readable = interpreter_paths()
        parent = SCRATCH_PARENT if rung is Rung.BUBBLEWRAP else tempfile.gettempdir()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        owner, proc = os.pidfd_open(os.getpid()), os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
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
        }
        command = [sys.executable, "-I", "-c", starter("mother", "main"), json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                wrap(command) if rung is Rung.BUBBLEWRAP else command,
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno(), owner, proc],
                cwd="/",
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
            os.close(owner)
            os.close(proc)
        self.scratch: str | None = None
        self._control.settimeout(_START_S)
        try:
            hello = self._control.makefile("rb").readline()
        except OSError:
            hello = b""
        if not hello:
            self.close()
            raise SandboxError("the sandbox's mother process did not start; its own words are on stderr above")
        greeting = json.loads(hello)
        self.missing: list[str] = greeting["missing"]
        self.scratch = None if rung is Rung.BUBBLEWRAP else greeting["scratch"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def worker(self) -> socket.socket:
        """A channel to a new worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's mother process is gone ({error}); open another sandbox") from None
        finally:
            theirs.close()
        return ours

    def close(self) -> None:
        """The mother ends its workers, removes the scratch folder and ends; what a dead mother left is removed here."""
        self._control.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
