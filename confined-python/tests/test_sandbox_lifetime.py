"""Whatever ends a sandbox, or the process that opened it, no process and no file of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from process_tree import all_end, family_of, has_ended, wait_for

from confined_python import Sandbox, SandboxResult
from confined_python.client.pool import SharedSandbox
from confined_python.errors import SandboxError

OWNER = """
from confined_python import Sandbox
sandbox = Sandbox(workers=2)
sandbox.run("open('left', 'w').write('x')")
holder = sandbox.session()
session = holder.__enter__()
session.run("open('kept', 'w').write('x')")
print(sandbox._host.pid, sandbox._host.scratch, flush=True)
sandbox.run("open('more', 'w').write('x')\\nwhile True: pass", timeout=60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_no_process_and_no_folder(how: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        host, scratch = owner.stdout.readline().split()
        wait_for(lambda: any(Path(scratch).glob("*/more")))  # it is in the middle of a run
        processes = family_of(int(host))
        assert len(processes) >= 4, "the host, two workers and their processes"
        owner.send_signal(how)
    except BaseException:
        owner.kill()
        raise
    finally:
        owner.communicate()
    assert all_end(*processes)
    wait_for(lambda: not Path(scratch).exists())


def test_closing_leaves_no_process_and_no_folder() -> None:
    sandbox = Sandbox(workers=2)
    scratch = Path(str(sandbox._host.scratch))
    sandbox.run("1")
    processes = family_of(sandbox._host.pid)
    sandbox.close()
    assert not scratch.exists()
    assert all(map(has_ended, processes))
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("1")


def test_a_killed_host_is_an_error_and_its_folder_is_removed_on_closing() -> None:
    sandbox = Sandbox(workers=1)
    scratch = Path(str(sandbox._host.scratch))
    os.kill(sandbox._host.pid, signal.SIGKILL)
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
        assert sandbox.run("1 + 1").value == 2
        assert not has_ended(sandbox._host.pid)


def test_a_killed_worker_is_replaced() -> None:
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run("1").ok
        below = family_of(sandbox._host.pid)[1:]
        for pid in below:
            with suppress(ProcessLookupError):  # it went with its worker
                os.kill(pid, signal.SIGKILL)
        assert all_end(*below)
        assert sandbox.run("2").value == 2


def test_the_worker_of_a_closed_session_serves_others_and_keeps_nothing() -> None:
    with Sandbox(workers=1) as sandbox:
        with sandbox.session() as session:
            session.run("secret = 1; import sys; sys.kept = 1")
            if sandbox.rung != "seccomp":
                session.run("open('f', 'w').write('x')")
        before = family_of(sandbox._host.pid)
        found = sandbox.run("import sys\n('secret' in globals(), hasattr(sys, 'kept'))")
        assert found.value == (False, False)
        if sandbox.rung != "seccomp":
            assert sandbox.run("import os; os.listdir()").value == []
        assert len(family_of(sandbox._host.pid)) <= len(before) + 1, "no new worker was needed"


FORKING = """
import os, sys
from confined_python.errors import SandboxError
from confined_python import Sandbox
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
print(sandbox._host._process.returncode)
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
    assert opener.stdout.readline() == "0\n", "its host ended by itself when it was closed"
    opener.communicate("")


def product(sandbox: Sandbox) -> SandboxResult:
    return sandbox.run("6 * 7")


def hosts() -> dict[int, psutil.Process]:
    """The sandboxes of this process, by the ids of their hosts."""
    children = psutil.Process().children()
    return {child.pid: child for child in children if "confined_python" in " ".join(child.cmdline())}


def test_one_that_died_is_replaced_and_the_old_one_is_closed() -> None:
    before = hosts()
    shared = SharedSandbox(workers=1, preload=())
    with shared.lent() as one, shared.lent() as other:
        assert one is other
    assert shared.use(product).value == 42
    with shared.lent() as dead:
        (host,) = (process for pid, process in hosts().items() if pid not in before)
        host.kill()
        host.wait(60)
        assert shared.use(product).value == 42, "another user's run opens a new one"
        with shared.lent() as new:
            assert new is not dead
    with pytest.raises(SandboxError, match="closed"):
        dead.run("1")
    new.close()
    assert hosts().keys() == before.keys()


def test_one_that_cannot_be_replaced_is_an_error_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedSandbox(workers=1, preload=())
    before = hosts()
    assert shared.use(product).value == 42
    for pid, host in hosts().items():
        if pid not in before:
            host.kill()
            host.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")  # nothing can be started on this machine any more
        with pytest.raises(SandboxError):
            shared.use(product)
    assert shared.use(product).value == 42
    with shared.lent() as sandbox:
        sandbox.close()


def sockets(process: psutil.Process) -> set[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {link for link in links if link.startswith("socket:")}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looked at in /proc")
def test_what_forks_programs_holds_no_channel_and_hosts_none() -> None:
    """A program's parent knows its worker alone; a judge's worker is not a program's."""
    with Sandbox(workers=2) as sandbox, sandbox.session() as program, sandbox.judging() as judge:
        program.run("1")
        judge.run("1")
        workers = psutil.Process(sandbox._host.pid).children()
        assert len(workers) == 3, "one rests, one has a program, one a judge"
        for worker in workers:
            (forker,) = worker.children()
            (tenant,) = forker.children()
            assert len(sockets(forker)) == 1 and not sockets(forker) & sockets(worker), (
                "one to the worker, whose end is another"
            )
            assert len(sockets(worker)) == 2 and not sockets(tenant)
