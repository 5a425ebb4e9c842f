"""Thousands of runs with random faults among them: no answer is lost or wrong, and nothing piles up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from process_tree import all_end, family_of, wait_for

from confined_python import Sandbox, SandboxResult
from confined_python.errors import SandboxError

CLIENTS = 4
FAMILY_GROWTH_KB = 32 << 10  # a leak of 2 kB a run shows in 20,000
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


def fds_and_private_kb(host: int) -> tuple[int, int]:
    """Sum up over a host and all below it, where this user may look; again if one of them ends meanwhile."""
    while True:
        fds, private = 0, 0
        try:
            for pid in family_of(host):
                with suppress(psutil.AccessDenied):  # one that took another user's rights
                    fds += psutil.Process(pid).num_fds()
                    private += psutil.Process(pid).memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
        return fds, private // 1024


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
        host = sandbox._host.pid
        for _ in range(20):
            sandbox.run("1")
        settle(sandbox)
        family_warm_kb, host_warm = fds_and_private_kb(host)[1], psutil.Process(host).memory_full_info().uss
        clients = [Client(sandbox, seed, runs // CLIENTS) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert [wrong for client in clients for wrong in client.wrong] == []
        assert sum(client.answered for client in clients) >= runs
        settle(sandbox)
        assert fds_and_private_kb(host)[1] < family_warm_kb + FAMILY_GROWTH_KB, "the workers' memory grew"
        for seed in range(killed_workers):
            with suppress(psutil.NoSuchProcess):  # one that was ending anyway
                victim = psutil.Process(random.Random(seed).choice(family_of(host)[1:]))
                victim.kill()
                assert all_end(victim.pid), "one that is not dead yet would still be given the next run"
            assert sandbox.run("1 + 1").value == 2
        settle(sandbox)
        assert psutil.Process(host).memory_full_info().uss < host_warm + (4 << 20), "the host's memory grew"


def settle(sandbox: Sandbox) -> None:
    """Once nothing runs, what is left is the host, two workers with a few folders, and a process that waits in each."""

    def is_settled() -> bool:
        processes = family_of(sandbox._host.pid)
        folders = list(Path(str(sandbox._host.scratch)).iterdir())
        files = [file for folder in folders for file in folder.iterdir()]
        few = len(processes) <= 1 + 3 * 2 and len(folders) <= 16 and not files
        return few and fds_and_private_kb(sandbox._host.pid)[0] <= 20 * len(processes)

    wait_for(is_settled, 60.0)


def test_a_short_soak() -> None:
    soak(300, killed_workers=40)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_long_soak() -> None:
    soak(20_000, killed_workers=50)
