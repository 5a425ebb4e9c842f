"""A run that the kernel kills for want of memory is the machine's failure; one that kills itself is its own.

The kernel's counter of such kills is a file of ours here; no machine runs out of memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.processes import children_of, family_of, wait_for
from toolgrpo.errors import SandboxError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import Score
from toolgrpo.rewards.code_exec import _SHARED
from toolgrpo.sandbox import RunStatus, Sandbox
from toolgrpo.sandbox.client import host_process

_REST_S = 2.0

KILLS_ITSELF = """
import ctypes, time
libc = ctypes.CDLL(None)
event = (ctypes.c_int * 16)(0, 0, 9, 0)  # when the timer is due: signal 9
timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(0, 0, 0, 1000)), None) == 0
time.sleep(5)
"""


def rest(until: float) -> str:
    """The beginning of a program that has not ended before this time, however often it is run."""
    return f"import time\ntime.sleep(max(0.0, {until} - time.time()))\n"


def killed_while_it_runs(counter: Counter, sandbox: Sandbox, run: Callable[[str], None]) -> None:
    """Let the kernel kill a program that `run` has run; again where a busy machine let it end before that."""
    for _ in range(10):
        until = time.time() + _REST_S
        thread = threading.Thread(target=run, args=(rest(until),))
        thread.start()
        wait_for(lambda: len(sandbox._resting) < sandbox._workers)
        time.sleep(0.1)
        counter.count()
        for process in confined(sandbox):
            process.kill()
        in_time = time.time() < until
        thread.join()
        if in_time:
            return
    pytest.fail(f"ten programs ended before they could be killed, each after {_REST_S:g} s")


class Counter:
    """The file in which the kernel counts."""

    def __init__(self, file: Path) -> None:
        self._file, self._kills = file, 2
        self.count()

    def count(self) -> None:
        self._kills += 1
        self._file.write_text(f"nr_free_pages 5\noom_kill {self._kills}\npgfault 9\n")


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(host_process, "VMSTAT", tmp_path / "vmstat")
    return Counter(tmp_path / "vmstat")


def confined(sandbox: Sandbox) -> list[psutil.Process]:
    """The processes that run code or wait for it: those without a child."""
    return [psutil.Process(pid) for pid in family_of(sandbox._host.pid) if not children_of(pid)]


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


def test_code_exec_scores_no_program_that_the_kernel_killed(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_SHARED, "_sandbox", None)
    scores: list[Score] = []

    def score(head: str) -> None:
        program = f"```python\n{head}def twice(x):\n    return 2 * x\n```"
        completion = [{"role": "assistant", "content": program}]
        scores.extend(get_reward("code_exec")(completions=[completion], tests=[["assert twice(2) == 4"]]))

    score("")  # starts the sandbox
    first = _SHARED._sandbox
    assert first is not None
    killed_while_it_runs(counter, first, score)
    assert set(scores) == {1.0}
    assert _SHARED._sandbox is not first, "scored by a second sandbox"
    first.close()
    _SHARED.use(Sandbox.close)


def test_where_nothing_counts_a_killed_run_is_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_process, "VMSTAT", tmp_path / "absent")
    with Sandbox(workers=1, preload=[]) as sandbox:
        assert sandbox.run(KILLS_ITSELF).status is RunStatus.KILLED
