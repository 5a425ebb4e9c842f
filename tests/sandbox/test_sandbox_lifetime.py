"""Whatever ends a sandbox, or the process that opened it, no process and no file of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.errors import SandboxError
from toolgrpo.sandbox import Sandbox

OWNER = """
from toolgrpo.sandbox import Sandbox
sandbox = Sandbox(workers=2)
sandbox.run("open('left', 'w').write('x')")
holder = sandbox.session()
session = holder.__enter__()
session.run("open('kept', 'w').write('x')")
print(sandbox._host.pid, sandbox._host.scratch, flush=True)
sandbox.run("open('more', 'w').write('x')\\nwhile True: pass", timeout=60)
"""


def host_of(sandbox: Sandbox) -> Any:
    """Return what starts its workers; its processes are looked at from outside."""
    return sandbox._host


def gone(host: int, scratch: Path, within_s: float = 120.0) -> bool:
    """Whether the host and its folder go away."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not scratch.exists() and not running(host):
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """None of a process that has ended meanwhile."""
    try:
        return [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_until(what: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "not within the time given"
        time.sleep(0.02)


def family(host: int) -> set[int]:
    """A process and everything below it."""
    found, new = set(), {host}
    while new:
        found |= new
        new = {child for pid in new for child in children(pid)} - found
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_no_process_and_no_folder(how: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    host, scratch = owner.stdout.readline().split()
    wait_until(lambda: any(Path(scratch).glob("*/more")))  # it is in the middle of a run
    processes = family(int(host))
    assert len(processes) >= 4, "the host, two workers and their processes"
    owner.send_signal(how)
    owner.communicate()
    assert gone(int(host), Path(scratch))
    wait_until(lambda: not [pid for pid in processes if running(pid)])


def test_closing_leaves_no_process_and_no_folder() -> None:
    sandbox = Sandbox(workers=2)
    host, scratch = host_of(sandbox).pid, Path(str(host_of(sandbox).scratch))
    sandbox.run("1")
    processes = family(host)
    sandbox.close()
    assert not scratch.exists()
    assert not [pid for pid in processes if running(pid)]
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("1")


def test_a_killed_host_is_an_error_and_its_folder_is_removed_on_closing() -> None:
    sandbox = Sandbox(workers=1)
    scratch = Path(str(host_of(sandbox).scratch))
    os.kill(host_of(sandbox).pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        for _ in range(12_000):  # its workers die a moment after it
            sandbox.run("1")
            time.sleep(0.01)
    sandbox.close()
    assert not scratch.exists()


def test_a_sandbox_outlives_the_thread_that_opened_it() -> None:
    opened: list[Sandbox] = []
    thread = threading.Thread(target=lambda: opened.append(Sandbox(workers=1)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with opened[0] as sandbox:
        host = host_of(sandbox).pid
        assert sandbox.run("1 + 1").value == 2
        assert running(host)


def test_a_killed_worker_is_replaced() -> None:
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run("1").ok
        below = family(host_of(sandbox).pid) - {host_of(sandbox).pid}
        for pid in below:
            with suppress(ProcessLookupError):  # it went with its worker
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not [pid for pid in below if running(pid)])
        assert sandbox.run("2").value == 2


def test_the_worker_of_a_closed_session_serves_others_and_keeps_nothing() -> None:
    with Sandbox(workers=1) as sandbox:
        with sandbox.session() as session:
            session.run("secret = 1; import sys; sys.kept = 1")
            if sandbox.rung != "seccomp":
                session.run("open('f', 'w').write('x')")
        before = family(host_of(sandbox).pid)
        found = sandbox.run("import sys\n('secret' in globals(), hasattr(sys, 'kept'))")
        assert found.value == (False, False)
        if sandbox.rung != "seccomp":
            assert sandbox.run("import os; os.listdir()").value == []
        assert len(family(host_of(sandbox).pid)) <= len(before) + 1, "no new worker was needed"


FORKING = """
import os, sys
from toolgrpo.errors import SandboxError
from toolgrpo.sandbox import Sandbox
sandbox = Sandbox(workers=1, preload=[], rung={rung!r}, allow_unsafe=True)
sandbox.run("1")
child = os.fork()
if child == 0:
    try:
        sandbox.run("2")
    except SandboxError as error:
        print(error, flush=True)
    sandbox.close()
    sys.stdin.read()  # its copies of the channels stay open
    os._exit(0)
sys.stdin.close()
while not os.path.exists({go!r}):
    os.sched_yield()
print(sandbox.run("6 * 7").value)
sandbox.close()
print([process.returncode for process in getattr(sandbox._host, "_workers", None) or [sandbox._host._process]])
"""


@pytest.mark.parametrize("rung", ["auto", "unsafe"])
def test_a_fork_of_the_opener_neither_uses_nor_ends_nor_keeps_its_sandbox(rung: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    opener = subprocess.Popen(
        [sys.executable, "-c", FORKING.format(rung=rung, go=str(go))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert opener.stdout is not None
    assert "open another one here" in opener.stdout.readline()
    go.touch()
    assert opener.stdout.readline() == "42\n"
    assert opener.stdout.readline() == "[0]\n", "its processes ended by themselves when it was closed"
    opener.communicate("")
