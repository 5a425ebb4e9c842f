"""Thousands of runs with random faults among them: no answer is lost or wrong, and nothing piles up."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.errors import SandboxError
from toolgrpo.sandbox import Sandbox, SandboxResult

CLIENTS = 4
FAMILY_GROWTH_KB = 32 << 10  # a leak of 2 kB a run shows in 20,000
SCRATCH_LEFT = 16  # folders: two for each of the workers that rest
FAULTS = (
    "1 / 0",
    "import os; os._exit(3)",
    "import os; os.kill(os.getpid(), 9)",
    "import ctypes; ctypes.string_at(0)",
    "print('x' * 10**7)",
    "import os\nos.closerange(0, 100)",
    "import os\nos.write(4, b'\\xff' * 100)",
    "x = bytearray(1 << 34)",
    "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(9,)).start()",
    "for n in range(50): open(str(n), 'w').write('x' * 1000)",
    "while True: pass",
)


def host_of(sandbox: Sandbox) -> Any:
    """Return what starts its workers; its processes are looked at from outside."""
    return sandbox._host


def descendants(pid: int) -> list[int]:
    below = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return below + [deeper for child in below for deeper in descendants(child)]


def alive(pid: int) -> list[int]:
    """A process and all below it; again if one ends while it is looked at."""
    while True:
        try:
            return [pid, *descendants(pid)]
        except (FileNotFoundError, ProcessLookupError):
            continue


def descriptors(pids: list[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def kill_and_wait(pid: int) -> None:
    """A process that has been killed but is not dead yet would still be given the next run."""
    victim = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([victim], [], [], 60.0)
    os.close(victim)


def private_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def family_kb(host: int) -> int:
    """The memory of a host and all below it that is nobody else's; again if one of them ends meanwhile."""
    while True:
        try:
            return sum(map(private_kb, alive(host)))
        except (FileNotFoundError, ProcessLookupError):
            continue


class Client(threading.Thread):
    """Runs, sessions and faults in a random but repeatable order; what came out wrong is kept."""

    def __init__(self, sandbox: Sandbox, seed: int, runs: int) -> None:
        super().__init__()
        self._sandbox, self._random, self._runs = sandbox, random.Random(seed), runs
        self.answered = 0
        self.wrong: list[object] = []

    def run(self) -> None:
        while self.answered < self._runs:
            kind = self._random.random()
            try:
                if kind < 0.8:
                    self._honest(self._sandbox.run)
                elif kind < 0.9:
                    with self._sandbox.session() as session:
                        for _ in range(3):
                            self._honest(session.run)
                else:
                    fault = self._random.choice(FAULTS)
                    self._count(self._sandbox.run(fault, timeout=0.1), fault)
            except SandboxError as error:
                self.wrong.append(error)
                return

    def _honest(self, run: Callable[..., SandboxResult]) -> None:
        a, b = self._random.randrange(10**6), self._random.randrange(10**6)
        result = run(f"x = {a}\nprint(x)\nx * {b}", timeout=30.0)
        self._count(result, "")
        if result.value != a * b or result.stdout != f"{a}\n":
            self.wrong.append(result)

    def _count(self, result: SandboxResult, fault: str) -> None:
        self.answered += 1
        if "while" in fault and result.status != "timeout":
            self.wrong.append(result)


def soak(runs: int, killed_workers: int) -> None:
    with Sandbox(workers=2) as sandbox:
        host = host_of(sandbox).pid
        for _ in range(20):
            sandbox.run("1")
        settle(sandbox)
        family_warm_kb, host_warm_kb = family_kb(host), private_kb(host)
        clients = [Client(sandbox, seed, runs // CLIENTS) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert [wrong for client in clients for wrong in client.wrong] == []
        assert sum(client.answered for client in clients) >= runs
        settle(sandbox)
        assert family_kb(host) < family_warm_kb + FAMILY_GROWTH_KB, "the workers' memory grew"
        for _ in range(killed_workers):
            kill_and_wait(random.Random(0).choice(alive(host)[1:]))
            assert sandbox.run("1 + 1").value == 2
        settle(sandbox)
        assert private_kb(host) < host_warm_kb + 4096, "the host's memory grew"


def settle(sandbox: Sandbox) -> None:
    """Once nothing runs, what is left is the host, two workers and a process that waits in each."""
    host = host_of(sandbox).pid
    deadline = time.monotonic() + 60.0
    while True:
        processes = alive(host)
        folders = list(Path(str(host_of(sandbox).scratch)).iterdir())
        files = [file for folder in folders for file in folder.iterdir()]
        try:
            fds = descriptors(processes)
        except FileNotFoundError:
            continue
        if len(processes) <= 1 + 3 * 2 and len(folders) <= SCRATCH_LEFT and not files and fds <= 20 * len(processes):
            return
        assert time.monotonic() < deadline, (len(processes), folders, files, fds)
        time.sleep(0.05)


def test_a_short_soak() -> None:
    soak(300, killed_workers=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_long_soak() -> None:
    soak(20_000, killed_workers=50)
