"""What a run can take beside its memory and its scratch folder: buffers, threads, files without a name."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from confined_python import Rung, RunStatus, Sandbox, SharedSandbox
from confined_python.base import Limits
from confined_python.errors import SandboxError
from confined_python.host.run_process import Launcher, Process, open_pipes
from confined_python.host.run_worker import Run

MIB = 1 << 20
SOCKETS = """
import socket
kept, total = [], 0
try:
    while True:
        pair = socket.socketpair()
        kept.append(pair)
        for end in pair:
            end.setblocking(False)
            for option in (7, 32):  # SO_SNDBUF, SO_SNDBUFFORCE
                try: end.setsockopt(1, option, 1 << 22)
                except OSError: pass
            try:
                while True: total += end.send(b'x' * 65536)
            except BlockingIOError: pass
except OSError: pass
total
"""
PIPES = """
import fcntl, os
kept, total = [], 0
try:
    while True:
        read, write = os.pipe()
        kept.append(write)
        os.set_blocking(write, False)
        try: fcntl.fcntl(write, 1031, 1 << 20)
        except OSError: pass
        try:
            while True: total += os.write(write, b'x' * 4096)
        except BlockingIOError: pass
except OSError: pass
total
"""
THREADS = """
import threading, time
threading.stack_size(32768)
rest = threading.Event()
made = 0
try:
    for _ in range(5000):
        threading.Thread(target=rest.wait, daemon=True).start()
        made += 1
except RuntimeError: pass
made > {limit}, time.sleep({rest})
"""
UNLINKED = """
import mmap, os, time
kept = []
for _ in range({files}):
    with open('f', 'w+b') as file:
        file.write(b'x' * (4 << 20))
        file.flush()
        kept.append({hold})
    os.unlink('f')
time.sleep({rest})
"""
HOLDS = {"mapped": "mmap.mmap(file.fileno(), 4096)", "open": "os.dup(file.fileno())"}


@pytest.mark.parametrize(("program", "most"), [(SOCKETS, 32 * MIB), (PIPES, 4 * MIB)])
def test_the_buffers_of_sockets_and_pipes_are_small(sandbox: Sandbox, program: str, most: int) -> None:
    result = sandbox.run(program, memory_mb=128)
    if sandbox.rung is Rung.SECCOMP and not result.ok:
        pytest.skip("a module that it needs cannot be imported there")
    assert result.ok and 0 < result.value < most, result


def test_threads_that_stay_end_the_run(sandbox: Sandbox) -> None:
    result = sandbox.run(THREADS.format(limit=256, rest=30))
    assert result.status is RunStatus.MEMORY and "more than 256 threads" in result.stderr, result
    assert sandbox.run("import asyncio\nasyncio.run(asyncio.sleep(0, 42))").value == 42


def test_all_runs_together_have_a_number_of_threads(sandbox: Sandbox) -> None:
    if os.getuid() != 0 and sandbox.rung is not Rung.NAMESPACES:
        pytest.skip("the limit would count all that this user runs")
    result = sandbox.run(THREADS.format(limit=2048, rest=0))
    assert result.status is RunStatus.MEMORY or result.value[0] is False, result


@pytest.mark.parametrize("hold", HOLDS)
def test_files_without_a_name_count_towards_the_scratch_folder(sandbox: Sandbox, hold: str) -> None:
    if sandbox.rung is Rung.SECCOMP:
        pytest.skip("programs have no files there")
    with Sandbox(rung=sandbox.rung, workers=1, limits=Limits(scratch_mb=16, file_mb=5)) as small:
        many = UNLINKED.format(files=12, hold=HOLDS[hold], rest=30)
        assert small.run(many).status is RunStatus.DISK
        few = UNLINKED.format(files=2, hold=HOLDS[hold], rest=0.4)
        assert small.run(few).ok


def test_half_a_character_of_standard_input_costs_no_worker(sandbox: Sandbox) -> None:
    assert sandbox.run("input()", stdin="a\ud800b\n").value == "a?b"
    assert not sandbox.run("'\ud800'").ok
    assert sandbox.run("6 * 7").value == 42


REQUEST: dict[str, Any] = {
    "code": "", "stdin": "", "keep": False, "timeout_s": 600.0, "scratch_mb": 1, "file_mb": 1, "output_chars": 100
}  # fmt: skip


class Silent(Launcher):
    """Has one process with nobody at the other ends of its pipes; each look finds `per_look_s` more CPU time used."""

    def __init__(self, per_look_s: float = 0.0) -> None:
        self.per_look_s, self.used_s = per_look_s, 0.0

    def start(self, path: str, limits: dict[str, int]) -> Process:
        ours, self.theirs = open_pipes()
        ended, self.alive = os.pipe()
        return Process(self, 1, ended, *ours)

    def kill(self, pid: int) -> None: ...

    def reap(self, pid: int) -> int:
        return 0

    def cpu_seconds(self, pid: int) -> float:
        self.used_s += self.per_look_s
        return self.used_s


@pytest.mark.parametrize(
    ("verdict", "per_look_s"),
    [("timeout", 200.0), ("abandoned", 0.0)],
    ids=["the CPU time of all threads", "the end of who asked"],
)
def test_what_ends_a_run_that_says_nothing(verdict: str, per_look_s: float, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if verdict == "abandoned":
            ours.close()
        launcher = Silent(per_look_s)
        process = launcher.start(str(tmp_path), {})
        run = Run(process, REQUEST, str(tmp_path))
        run.watch(theirs)
    assert run.answer()["verdict"] == verdict
    process.release()
    for fd in (*launcher.theirs, launcher.alive):
        os.close(fd)


def test_a_library_that_the_sandbox_cannot_see_is_said_and_no_zero() -> None:
    shared = SharedSandbox(workers=1, preload=("no_such_library", "json"))
    with pytest.raises(SandboxError, match="no module no_such_library"):
        shared.values(["import json\n1", "import no_such_library\n1"], timeout=20)
    assert shared.values(["1", "import another\n1"], timeout=20) == [1, None], (
        "what was not asked for is the code's own"
    )
