"""A worker that confines nothing and needs nothing of Linux: each process that runs code is a new
interpreter.

For `allow_unsafe=True` on macOS, and on a Linux where nothing confines. Forking an interpreter that
has imported numpy is not safe on macOS, so nothing is forked here; the price is an interpreter's
start for each run, paid ahead of it.

Invariants: imports only what every POSIX system has; ends with its opener, and with it the process
that runs code, which holds the read end of a pipe whose write end is here
(inside/unconfined_main.py).
Not covered: what the code starts in a process group of its own lives on; when this process and its
opener are both killed, its folder stays until the next sandbox starts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from toolgrpo.sandbox.host import scratch
from toolgrpo.sandbox.host.run_process import Process
from toolgrpo.sandbox.host.run_worker import serve
from toolgrpo.sandbox.host.scratch import make
from toolgrpo.sandbox.inside.unconfined_main import READY
from toolgrpo.sandbox.paths import starter

_LOOK_S = 1.0  # between looks at whether the opener lives
_ENVIRONMENT = {"PATH": "", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    settings = json.loads(sys.argv.pop())
    channel = socket.socket(fileno=settings["channel"])
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    threading.Thread(target=_hang_up_with_opener, args=(channel, settings["opener"]), daemon=True).start()
    folder, _ = scratch.claim(settings["tmp"])
    try:
        serve(SpawnLauncher(), channel, folder, settings["limits"])
    finally:
        scratch.remove(folder)


def _hang_up_with_opener(channel: socket.socket, opener: int) -> None:
    """End the channel when the opener has ended.

    It ends by itself unless a process that the opener forked holds it too.
    """
    while os.getppid() == opener:
        time.sleep(_LOOK_S)
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)


class SpawnedProcess(Process):
    """A new interpreter, watched by a thread: nothing else tells of its end on every system."""

    __slots__ = ("_ended_here", "_leash", "_program", "_waiter")

    def __init__(self, program: subprocess.Popen[bytes], leash: int, pipes: tuple[int, int, int, int, int]) -> None:
        ended, self._ended_here = os.pipe()
        super().__init__(program.pid, ended, *pipes)
        self._program, self._leash = program, leash
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def cpu_seconds(self) -> float:
        return 0.0  # it limits its own, before each run

    def reap(self) -> int:
        self._waiter.join()
        self.pid = -1
        return int(self._program.returncode)

    def release(self) -> None:
        super().release()
        os.close(self._leash)

    def _wait(self) -> None:
        self._program.wait()
        os.close(self._ended_here)


class SpawnLauncher:
    """Starts new interpreters, each in a process group of its own."""

    def prepare_scratch(self, scratch: str) -> None:
        make(scratch, owner=None)

    def start(self, rules: None, scratch: str, limits: dict[str, int]) -> Process:
        stdin, stdout, stderr, requests, results, leash = (os.pipe() for _ in range(6))
        lent = [stdin[0], stdout[1], stderr[1], requests[0], results[1], leash[0]]
        settings = {
            "requests": requests[0],
            "results": results[1],
            "leash": leash[0],
            **limits,
        }
        program = subprocess.Popen(
            [sys.executable, "-I", "-c", starter("inside.unconfined_main", "main"), json.dumps(settings)],
            stdin=stdin[0],
            stdout=stdout[1],
            stderr=stderr[1],
            pass_fds=lent[3:],
            cwd=scratch,
            env={**_ENVIRONMENT, "HOME": scratch, "TMPDIR": scratch},
            process_group=0,
        )
        for fd in lent:
            os.close(fd)
        if os.read(results[0], 1) != READY:  # before its first run, whose time does not count the interpreter's start
            said = os.read(stderr[0], 1 << 16).decode(errors="replace")
            raise RuntimeError(f"the interpreter of a run did not start: {said}")
        ours = (stdin[1], stdout[0], stderr[0], requests[1], results[0])
        for fd in ours:
            os.set_blocking(fd, False)
        return SpawnedProcess(program, leash[1], ours)

    def kill(self, process: Process) -> None:
        if process.pid > 0:
            with suppress(ProcessLookupError, PermissionError):  # macOS: not permitted where all have ended already
                os.killpg(process.pid, signal.SIGKILL)

    def was_out_of_memory(self) -> bool:
        return False  # cannot be told on every system
