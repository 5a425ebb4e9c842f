"""A tool that wears its worker out costs no later call anything: the worker is put right, or replaced in time.

One worker only, so that every later call would meet the damage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools import Toolbox, load_tools, run_tool

TOOLS = Path(__file__).parents[1] / "fixtures" / "tools" / "wearing_tools.py"
HONEST = (attempt("open_file"), attempt("wait", seconds=0.01), attempt("nap", seconds=0.01), attempt("say_where"))


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    log_path = tmp_path_factory.mktemp("log") / "tools.log"
    with load_tools(TOOLS, tool_timeout_s=60.0, workers=1, memory_mb=3000, log_path=log_path) as box:
        yield box


def test_isolated_calls_that_overrun_make_room_for_those_that_wait(tmp_path: Path) -> None:
    text = "import time\nfrom toolgrpo.tools import tool\n\n@tool(isolate=True)\ndef nap(seconds: float) -> str:\n    'Nap.'\n"
    (tmp_path / "nap.py").write_text(f"{text}    time.sleep(seconds)\n    return 'up'\n\nTOOL_FUNCTIONS = [nap]\n")
    with load_tools(tmp_path / "nap.py", workers=1, threads_per_worker=1, tool_timeout_s=5.0) as box:
        late, good = call_all(box, attempt("nap", seconds=600.0), attempt("nap", seconds=0.0))
    assert late.error is ToolErrorKind.TIMEOUT and good.content == "up"


def test_calls_that_wait_are_not_made_when_their_episode_is_over(tmp_path: Path) -> None:
    text = """
import pathlib, time

HERE = pathlib.Path(__file__).parent

def note(n: int) -> str:
    'Note.'
    with open(HERE / 'log', 'a') as log:
        log.write(f'{n} ')
    while n == 0 and not (HERE / 'go').exists():
        time.sleep(0.01)
    return 'noted'

TOOL_FUNCTIONS = [note]
"""
    (tmp_path / "note.py").write_text(text)

    async def give_up(box: Toolbox) -> None:
        async with box.session({}) as session:
            for n in range(4):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(session.call([attempt("note", n=n)]), 0.05)

    with load_tools(tmp_path / "note.py", workers=1, threads_per_worker=1, tool_timeout_s=60.0) as box:
        asyncio.run(give_up(box))
        (tmp_path / "go").touch()
        assert run_tool(box, {"name": "note", "arguments": {"n": 9}}).ok
    assert (tmp_path / "log").read_text() in ("0 9 ", "9 ")


OF_PROCESS = ("leak_descriptors", "close_streams", "clear_environment", "change_folder", "leak_threads")
OF_LOOP = ("interrupt_main", "stop_loop", "exit_in_callback", "interrupt_in_task", "block_loop")
FAIL = {"interrupt_in_task": ToolErrorKind.RAISED, "block_loop": ToolErrorKind.TIMEOUT}


@pytest.mark.parametrize("name", [*OF_PROCESS, "take_address_space", *OF_LOOP])
def test_later_calls_meet_a_worker_that_works(toolbox: Toolbox, name: str) -> None:
    before = run_tool(toolbox, {"name": "say_where"})
    result = run_tool(toolbox, {"name": name})
    assert result.error == FAIL.get(name), result.content
    answers = call_all(toolbox, *HONEST * 11)
    assert [answer.content for answer in answers if not answer.ok] == []
    assert {answer.content for answer in answers[3::4]} == {before.content}


@pytest.mark.parametrize("name", OF_LOOP)
def test_calls_beside_it_lose_nothing(toolbox: Toolbox, name: str) -> None:
    """Those on the loop go on there; those that had not begun on a blocked one go to another worker."""
    waits = [attempt("wait", seconds=0.3) for _ in range(10)]
    answers = call_all(toolbox, attempt(name), *waits, attempt("nap", seconds=0.3))[1:]
    assert [answer.content for answer in answers] == ["waited"] * 10 + ["slept"]


def test_a_worker_that_leaks_is_replaced_before_it_is_empty(toolbox: Toolbox) -> None:
    """A hundred descriptors a call: without a replacement the process's limit would come within some calls."""
    seen = [run_tool(toolbox, {"name": "leak_some_descriptors"}) for _ in range(30)]
    assert all(result.ok for result in seen)
    assert len({result.content for result in seen}) > 1


def test_a_worker_that_nothing_is_wrong_with_stays(toolbox: Toolbox) -> None:
    call_all(toolbox, *HONEST * 40)
    pids = {answer.content for _ in range(3) for answer in call_all(toolbox, *[attempt("process_id")] * 10)}
    assert len(pids) == 1


def test_a_file_whose_import_maps_more_than_a_worker_may_take_runs_its_calls(tmp_path: Path) -> None:
    """A corpus that is mapped, say: the limit is for what calls take."""
    (tmp_path / "mapped.py").write_text(
        "import mmap\nkept = mmap.mmap(-1, 3 << 30)\n\ndef take(mb: int) -> int:\n    'Take.'\n    return len(bytes(mb << 20)) >> 20\n\n"
        "TOOL_FUNCTIONS = [take]\n"
    )
    with load_tools(tmp_path / "mapped.py", workers=1, memory_mb=2000) as box:
        assert run_tool(box, {"name": "take", "arguments": {"mb": 100}}).content == "100"
        assert "out of memory" in run_tool(box, {"name": "take", "arguments": {"mb": 4000}}).content
