"""A run that the kernel kills for want of memory is the machine's failure; one that kills itself is its own.

The kernel's counter of such kills is a file of ours here; no machine runs out of memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from out_of_memory import KILLS_ITSELF, Counter, confined, killed_while_it_runs
from process_tree import children_of

from confined_python import RunStatus, Sandbox
from confined_python.client import host_process
from confined_python.errors import SandboxError


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(host_process, "VMSTAT", tmp_path / "vmstat")
    return Counter(tmp_path / "vmstat")


def test_a_session_killed_by_the_kernel_is_an_error(counter: Counter) -> None:
    with Sandbox(workers=1, preload=[]) as sandbox:
        with sandbox.session() as session:
            session.run("x = 1")
            (process,) = confined(sandbox)
            counter.count()
            process.kill()
            with pytest.raises(SandboxError, match="lost"):
                session.run("x")
        assert sandbox.run("6 * 7").value == 42


def test_a_session_killed_for_another_reason_is_a_killed_run(counter: Counter) -> None:
    with Sandbox(workers=1, preload=[]) as sandbox, sandbox.session() as session:
        session.run("x = 1")
        (process,) = confined(sandbox)
        process.kill()
        lost = session.run("x")
        assert lost.status is RunStatus.KILLED and lost.state_lost
        assert session.run("6 * 7").value == 42


def test_a_run_killed_by_the_kernel_is_run_once_more(counter: Counter) -> None:
    answers = []
    with Sandbox(workers=1, preload=[]) as sandbox:
        before = {*children_of(sandbox._host.pid)}
        killed_while_it_runs(counter, sandbox, lambda head: answers.append(sandbox.run(f"{head}42", timeout=120.0)))
        assert answers[-1].value == 42
        after = {*children_of(sandbox._host.pid)}
        assert not before & after, "another worker ran it"


def test_a_run_that_kills_itself_is_killed_whatever_the_kernel_did_meanwhile(counter: Counter) -> None:
    with Sandbox(workers=1, preload=[]) as sandbox:
        assert sandbox.run(KILLS_ITSELF).status is RunStatus.KILLED
        counter.count()  # another program of this machine was killed; the run is tried again, and is the same
        assert sandbox.run(KILLS_ITSELF).status is RunStatus.KILLED
        assert sandbox.run("6 * 7").value == 42


def test_where_nothing_counts_a_killed_run_is_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "VMSTAT", tmp_path / "absent")
    with Sandbox(workers=1, preload=[]) as sandbox:
        assert sandbox.run(KILLS_ITSELF).status is RunStatus.KILLED
