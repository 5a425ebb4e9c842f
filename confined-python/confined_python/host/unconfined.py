"""The rung `unsafe`: each run is an interpreter, started ahead of it; code can undo its limits and leave its group."""

from __future__ import annotations

import _thread
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from confined_python.base import python_command
from confined_python.host import scratch
from confined_python.host.run_process import Launcher, Process, kernel_limits, open_pipes
from confined_python.host.run_worker import serve
from confined_python.inside import cells


def main() -> None:
    settings, launcher = json.loads(sys.argv.pop()), _Launcher()
    control, (folder, _) = socket.socket(fileno=settings["control"]), scratch.claim(settings["tmp"])
    control.sendall(json.dumps(folder).encode() + b"\n")
    while os.getppid() == settings["opener"]:  # a fork of it may hold the control open
        if select.select([control], [], [], 0.1)[0]:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not fds:
                break
            worker = launcher, socket.socket(fileno=fds[0]), folder, settings["limits"]
            threading.Thread(target=serve, args=worker, daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what workers say from here on is about this end
    for pid in list(launcher.programs):
        launcher.kill(pid)
    scratch.remove(folder)
    os._exit(0)


class _Launcher(Launcher):
    def __init__(self) -> None:
        self.programs: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, path: str, limits: dict[str, int]) -> Process:
        ours, theirs = open_pipes()
        ended, ends = os.pipe()
        program = subprocess.Popen(
            python_command("host.unconfined", "run_cells", [os.getpid(), *theirs[3:], limits]),
            stdin=theirs[0],
            stdout=theirs[1],
            stderr=theirs[2],
            pass_fds=theirs[3:],
            cwd=path,
            env={**os.environ, "HOME": path, "TMPDIR": path},
            process_group=0,
        )
        threading.Thread(target=lambda: (program.wait(), os.close(ends)), daemon=True).start()  # type: ignore[func-returns-value]  # two calls
        for fd in theirs:
            os.close(fd)
        self.programs[program.pid] = program
        if not os.read(ours[-1], 1):  # it waits for its first request
            raise RuntimeError(f"the interpreter of a run did not start: {os.read(ours[2], 9999)!r}")
        return Process(self, program.pid, ended, *ours)

    def reap(self, pid: int) -> int:
        return self.programs.pop(pid).wait()

    def kill(self, pid: int) -> None:
        with suppress(KeyError, OSError):  # it has ended meanwhile
            self.programs[pid].kill()  # it may have left its group
            os.killpg(pid, signal.SIGKILL)


def run_cells() -> None:
    host, requests, results, limits = json.loads(sys.argv.pop())  # programs see no arguments
    for kind, most in kernel_limits(limits):
        _limit(kind, most)
    cells.prepare_streams()
    _thread.start_new_thread(_guard, (host, results, limits["memory_mb"] << 20))  # programs see those of `threading`
    os.write(results, b"\n")
    cells.serve(requests, results, lambda s: _limit(resource.RLIMIT_CPU, int(time.process_time() + s) + 2))


def _limit(kind: int, most: int) -> None:
    with suppress(ValueError, OSError):  # refused by this system
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _guard(host: int, results: int, memory: int) -> None:
    unit = 1 if os.uname().sysname == "Darwin" else 1024  # of ru_maxrss
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while os.getppid() == host:
        time.sleep(0.1)
        if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit > memory:
            cells.report(results, {"status": "memory", "exit_code": 1})
            os._exit(1)
    os.killpg(0, signal.SIGKILL)
