"""`kill -9` of the supervisor: what had begun is lost and says so, the rest runs, once, and the toolbox lives on.

Whoever is killed, alone or together: what a tool started goes with it, and nothing is left of the tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from process_tree import all_end, children_of, has_ended, wait_for

from confined_python.processes.linux import children
from tests.support.tool_calls import attempt
from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.errors import ToolExecutorError
from toolgrpo.tools import Toolbox, load_tools, run_tool

TOOLS = Path(__file__).parents[1] / "fixtures" / "tools" / "process_tools.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


OTHERS: set[int] = set()  # supervisors of toolboxes that tests before these keep open in this process


@pytest.fixture(autouse=True)
def _others() -> None:
    OTHERS.update(supervisors())


def supervisors() -> set[int]:
    """The supervisors of this test's toolboxes, importing ones too: below the reapers."""
    found = set[int]()
    for child in children():
        with suppress(OSError):  # it may have ended
            if Path(f"/proc/{child}/comm").read_text() == "python-reaper\n":
                found.update(children_of(child))
    return found - OTHERS


def kill_next(after: set[int]) -> int:
    """Kill the first supervisor that is not one of these, as soon as it is there; return when its workers have ended too."""
    wait_for(lambda: supervisors() - after)
    (pid,) = supervisors() - after
    below = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert all_end(pid, *below)
    return pid


def answers_while(box: Toolbox, attempts: list[CallAttempt], what: Callable[[], object]) -> list[ToolResult]:
    """The answers to these calls, each of an episode of its own, while `what` runs on a thread."""

    async def one(each: CallAttempt) -> ToolResult:
        async with box.session({}) as session:
            return (await session.call([each]))[0]

    async def run() -> list[ToolResult]:
        calls = [asyncio.create_task(one(each)) for each in attempts]
        await asyncio.to_thread(what)
        return await asyncio.gather(*calls)

    return asyncio.run(run())


@pytest.fixture
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Toolbox]:
    """`param`: workers, seconds of import, and whether workers are started by exec."""
    workers, import_s, by_exec = request.param
    monkeypatch.setenv("TEST_IMPORT_S", str(import_s))
    if by_exec:
        monkeypatch.setenv("TEST_IMPORT_THREAD", "1")
    log_path = tmp_path / "log"
    with load_tools(TOOLS, workers=workers, threads_per_worker=4, tool_timeout_s=60, log_path=log_path) as toolbox:
        yield toolbox


@pytest.mark.parametrize("box", [(4, 0.5, False), (2, 0.3, True)], indirect=True)
def test_while_busy_begun_calls_are_lost_and_the_others_run_once(box: Toolbox, tmp_path: Path) -> None:
    notes = [tmp_path / f"note{number}" for number in range(40)]

    def kill_when_all_are_busy() -> None:
        wait_for(lambda: sum(note.exists() for note in notes) >= 4)
        kill_next(after=set())

    calls = [attempt("note", path=str(note), seconds=0.5) for note in notes]
    results = answers_while(box, calls, kill_when_all_are_busy)
    lost = [result for result in results if not result.ok]
    ran = [note.read_text().count("begun") if note.exists() else 0 for note in notes]
    assert max(ran) == 1  # none twice, and whatever was answered ran
    assert all(times == 1 for times, result in zip(ran, results, strict=True) if result.ok)
    assert 0 < len(lost) <= 16 and {result.error for result in lost} == {ToolErrorKind.DIED}


@pytest.mark.parametrize("box", [(8, 0.5, False)], indirect=True)
def test_while_idle_nothing_is_lost(box: Toolbox, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    killed = kill_next(after=set())
    results = answers_while(box, [attempt("note", path=str(notes), seconds=0)] * 20, lambda: None)
    assert [result.content for result in results] == ["noted"] * 20
    assert int(run_tool(box, {"name": "supervisor"}).content) != killed


@pytest.mark.parametrize("box", [(16, 0.5, False), (4, 1.0, True)], indirect=True)
def test_while_it_imports_again_and_again_nothing_more_is_lost(box: Toolbox, tmp_path: Path) -> None:
    """Killed while idle, twice while its successor imports, and once when that is about to start workers."""
    notes = tmp_path / "notes"

    def kill_four() -> None:
        killed: set[int] = set()
        for pause_s in (0.0, 0.3, 0.3, 1.0):
            time.sleep(pause_s)
            killed.add(kill_next(after=killed))

    kill_next(after=set())
    calls = [attempt("note", path=str(notes), seconds=0), attempt("anote", path=str(notes))] * 20
    results = answers_while(box, calls, kill_four)
    answered = sum(result.ok for result in results)
    assert answered + sum(result.error is ToolErrorKind.DIED for result in results) == 40
    assert answered <= len(notes.read_text().splitlines()) <= 40  # none twice
    assert run_tool(box, {"name": "anote", "arguments": {"path": str(notes)}}).ok


_ENVIRONMENT = """
import os
class Plain:
    def reset(self, **row):
        return "ready"
    def above(self) -> int:
        '''Give the id of the process above.'''
        return os.getppid()
ENVIRONMENT = Plain
"""


def test_an_environment_that_opens_meanwhile_opens_and_one_that_was_open_is_gone(tmp_path: Path) -> None:
    path, call = tmp_path / "plain.py", {"name": "above"}
    path.write_text(_ENVIRONMENT)
    with load_tools(path, workers=1, tool_timeout_s=60) as box, box.session({}) as before:
        above = before.run(call).content
        os.kill(int(above), signal.SIGKILL)
        with box.session({}) as after:
            assert after.observation == "ready" and int(after.run(call).content) != int(above)
        assert before.run(call).error is ToolErrorKind.DIED


_ONLY_ONCE = """
import os, threading
from pathlib import Path
threading.Thread(target=threading.Event().wait, daemon=True).start()  # so that workers import it again
marker = Path(__file__).with_suffix(".imported")
if marker.exists():
    os._exit(3)
marker.touch()

def polite() -> str:
    'Say hello.'
    return "hello"

TOOL_FUNCTIONS = [polite]
"""


def test_calls_are_refused_where_no_worker_can_start(tmp_path: Path) -> None:
    """Those that waited meanwhile too: none waits for ever."""
    path = tmp_path / "only_once.py"
    path.write_text(_ONLY_ONCE)
    with load_tools(path, workers=2, log_path=tmp_path / "log") as box:
        for _ in range(2):
            with pytest.raises(ToolExecutorError, match="end before they can take a call"):
                answers_while(box, [attempt("polite")] * 4, lambda: None)


def test_killed_together_with_its_reaper_it_leaves_nothing(tmp_path: Path) -> None:
    with load_tools(TOOLS, workers=1, tool_timeout_s=60, log_path=tmp_path / "log") as box:
        call = {"name": "start_child", "arguments": {"detached": True}}
        child, _, supervisor = json.loads(run_tool(box, call).content)
        reaper = next(pid for pid in children() if supervisor in children_of(pid))
        for pid in (reaper, supervisor):
            os.kill(pid, signal.SIGKILL)
        assert all_end(child)
        assert run_tool(box, {"name": "supervisor"}).ok


_TRAINER = """
import json, os, sys, time
from toolgrpo.tools import load_tools, run_tool
box = load_tools(sys.argv[1], workers=1, tool_timeout_s=60)
call = {"name": "start_child", "arguments": {"detached": sys.argv[2] == "True"}}
child, worker, supervisor = json.loads(run_tool(box, call).content)
reaper = int(open(f"/proc/{supervisor}/stat").read().rpartition(")")[2].split()[1])
fork = os.fork() if sys.argv[3] == "True" else 0  # a data loader's worker, which holds all that the trainer held
if sys.argv[3] == "True" and fork == 0:
    time.sleep(600)
    os._exit(0)
found = {"child": child, "worker": worker, "supervisor": supervisor, "reaper": reaper, "trainer": os.getpid()}
print(json.dumps({**found, "fork": fork}), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("killed", "detached", "forked"),
    [
        (["trainer"], True, False),
        (["trainer"], False, True),
        (["supervisor", "trainer"], True, False),
        (["supervisor", "trainer"], False, True),
        (["worker", "supervisor", "trainer"], True, False),
        (["reaper", "trainer"], True, False),
        (["reaper"], True, False),
        (["supervisor"], True, False),
        (["worker"], True, False),
    ],
)
def test_a_child_of_a_tool_ends_with_those_above(killed: list[str], detached: bool, forked: bool) -> None:
    command = [sys.executable, "-c", _TRAINER, str(TOOLS), str(detached), str(forked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        assert trainer.stdout is not None
        found: dict[str, int] = json.loads(trainer.stdout.readline())
        try:
            for name in killed:
                os.kill(found[name], signal.SIGKILL)
            assert all_end(found["child"], found["worker"])
            if "trainer" in killed:
                assert all_end(found["supervisor"], found["reaper"])
        finally:
            for name in ("trainer", "fork", "child"):
                if found[name] and not has_ended(found[name]):
                    os.kill(found[name], signal.SIGKILL)


def test_a_supervisor_whose_import_never_ends_goes_with_its_trainer(tmp_path: Path) -> None:
    """Whether or not the trainer lived long enough to be watched: nothing spins on."""
    path, ids = tmp_path / "spins.py", tmp_path / "ids"
    path.write_text(
        f"import os\nopen({str(ids)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}} ')\nwhile True: pass\n"
    )
    code = f"from toolgrpo.tools import load_tools; load_tools({str(path)!r}, workers=1)"
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: ids.exists() and len(ids.read_text().split()) == 2)
    finally:
        trainer.kill()
        trainer.wait()
    assert all_end(*(int(pid) for pid in ids.read_text().split()))
