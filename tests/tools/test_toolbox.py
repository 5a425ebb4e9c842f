"""The toolbox over real worker processes: calls, order, limits, caching, loops that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.errors import ConfigError, PluginError, ToolExecutorError
from toolgrpo.tools import Toolbox, load_tools, run_tool, tool

pytestmark = pytest.mark.filterwarnings("ignore:the model will see only")
MATH = Path(__file__).parents[2] / "tools_funcs" / "arithmetic_tools.py"


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def nap(seconds: float, answer: str = "") -> str:
    """Sleep."""
    time.sleep(seconds)
    return answer


async def nap_async(seconds: float, answer: str = "") -> str:
    """Sleep on the loop."""
    await asyncio.sleep(seconds)
    return answer


@tool(cache=True)
def count_runs(path: str) -> int:
    """Count how often this ran."""
    with open(path, "a") as file:
        file.write("x")
    time.sleep(0.1)
    return os.path.getsize(path)


@tool(ends_episode=True)
def stop(well: bool) -> str:
    """End the episode."""
    if not well:
        raise ValueError("not yet")
    return "done"


@tool(in_process=True)
def here() -> int:
    """Give the id of the process this runs in."""
    return os.getpid()


def worker_id() -> int:
    """Give the id of the process this runs in."""
    return os.getpid()


@tool(timeout=120)
def meet(folder: str, number: int, all_of: int) -> str:
    """Wait until as many calls are here."""
    with open(os.path.join(folder, str(number)), "w"):
        pass
    while len(os.listdir(folder)) < all_of:
        time.sleep(0.02)
    return "met"


def long_text(n: int) -> str:
    """Give much text."""
    return "x" * n


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    tools: list[Callable[..., Any]] = [add, nap, nap_async, count_runs, here, stop, worker_id, meet, long_text]
    with load_tools(tools, workers=2, tool_timeout_s=120, max_result_chars=100) as box:
        yield box


def test_calls_of_one_turn_run_at_the_same_time(toolbox: Toolbox, tmp_path: Path) -> None:
    """Each waits for all others: one after the other they would wait until they are given up."""
    results = call_all(toolbox, *(attempt("meet", folder=str(tmp_path), number=i, all_of=40) for i in range(40)))
    assert [result.content for result in results] == ["met"] * 40


def test_workers_outlive_the_loops_that_use_them(toolbox: Toolbox) -> None:
    ids = {result.content for _ in range(5) for result in call_all(toolbox, attempt("worker_id"))}
    assert len(ids) <= 2
    assert str(os.getpid()) not in ids


_TRAINER = """
import os, sys
from toolgrpo.tools import load_tools, run_tool

def family() -> list:
    '''Say what this process inherited, and who started it.'''
    import os, sys
    print("a tool speaks")
    print("a tool complains", file=sys.stderr)
    return [hasattr(sys, "of_the_trainer"), os.getpid(), os.getppid()]

if __name__ == "__main__":
    sys.of_the_trainer = True
    with load_tools([family], workers=1, log_path=sys.argv[1]) as box:
        print(os.getpid(), run_tool(box, {"name": "family"}).content)
"""


def test_workers_start_clean_and_what_tools_print_goes_to_the_log(tmp_path: Path) -> None:
    script, log = tmp_path / "trainer.py", tmp_path / "tools.log"
    script.write_text(_TRAINER)
    done = subprocess.run([sys.executable, script, log], capture_output=True, text=True, timeout=240, check=True)
    trainer, _, rest = done.stdout.partition(" ")
    inherited, worker, parent = json.loads(rest)
    assert inherited is False  # a fork of the trainer would have it
    assert len({int(trainer), worker, parent}) == 3  # the parent is the supervisor, not the trainer
    assert "a tool" not in done.stdout + done.stderr
    assert "a tool speaks" in log.read_text() and "a tool complains" in log.read_text()


def test_run_tool_works_inside_a_running_loop(toolbox: Toolbox) -> None:
    async def inside() -> ToolResult:
        return run_tool(toolbox, {"name": "add", "arguments": {"a": 1, "b": 1}})

    assert asyncio.run(inside()).content == "2"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', None),
        ({"name": "add", "arguments": {"a": "1", "b": 2.0}}, None),
        ({"name": "add", "arguments": '{"a": 1, "b": 2}'}, None),
        ({"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}, None),
        ("not json", ToolErrorKind.INVALID_JSON),
        ("[1, 2]", ToolErrorKind.INVALID_JSON),
        ("[" * 100_000, ToolErrorKind.INVALID_JSON),
        (None, ToolErrorKind.INVALID_JSON),
        ({"arguments": {}}, ToolErrorKind.MISSING_NAME),
        ({"name": 7}, ToolErrorKind.MISSING_NAME),
        ({"name": "ad"}, ToolErrorKind.UNKNOWN_TOOL),
        ({"name": "add", "arguments": [1, 2]}, ToolErrorKind.BAD_ARGUMENTS),
        ({"name": "add", "arguments": "1, 2"}, ToolErrorKind.INVALID_JSON),
        ({"name": "add"}, ToolErrorKind.BAD_ARGUMENTS),
        ({"name": "stop", "arguments": {"well": False}}, ToolErrorKind.RAISED),
    ],
)
def test_run_tool_answers_everything_a_model_can_write(
    toolbox: Toolbox, call: object, error: ToolErrorKind | None
) -> None:
    result = run_tool(toolbox, call)
    assert result.error == error, result.content
    assert result.ok == (error is None)
    assert result.content == "3" if error is None else result.content.startswith("Error: ")
    assert len(result.content) < 1100


def test_the_form_of_a_call_is_shown_with_a_whole_call_in_it(toolbox: Toolbox) -> None:
    broken = CallAttempt(
        AttemptStatus.INVALID_JSON, '{"name": add "a": }', detail='a call is {"name": ..., "arguments": {...}}'
    )
    for call in (broken, "add, please"):
        shown = run_tool(toolbox, call).content
        assert '{"name": "add", "arguments": {"a": 3, "b": 3}}' in shown and "..." not in shown


def test_an_unknown_name_is_answered_with_the_nearest(toolbox: Toolbox) -> None:
    assert "did you mean 'add'?" in run_tool(toolbox, {"name": "Add"}).content


def test_a_stop_tool_ends_the_episode_only_when_it_went_well(toolbox: Toolbox) -> None:
    good, bad = call_all(toolbox, attempt("stop", well=True), attempt("stop", well=False))
    assert (good.ends_episode, bad.ends_episode) == (True, False)


def test_long_results_are_cut_with_a_notice(toolbox: Toolbox) -> None:
    result = run_tool(toolbox, {"name": "long_text", "arguments": {"n": 1000}})
    assert result.truncated
    assert "\n[... 900 characters left out ...]\n" in result.content and result.left_out == 900


def test_a_pure_tool_is_asked_once(toolbox: Toolbox, tmp_path: Path) -> None:
    path = str(tmp_path / "runs")
    results = call_all(toolbox, *(attempt("count_runs", path=path) for _ in range(5)))
    results += call_all(toolbox, attempt("count_runs", path=path))
    assert [result.content for result in results] == ["1"] * 6
    assert sorted(result.cached for result in results) == [False] + [True] * 5
    (run,) = (result for result in results if not result.cached)
    assert results[-1].duration_s != run.duration_s  # the time of this answer, not of the call it repeats


def test_an_episode_that_is_cancelled_leaves_the_tools_in_order(toolbox: Toolbox) -> None:
    async def run() -> str:
        async with toolbox.session({}) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.call([attempt("nap", seconds=30)]), 0.05)
            (result,) = await session.call([attempt("add", a=2, b=2)])
            return result.content

    assert asyncio.run(run()) == "4"


def test_a_closed_toolbox_says_so() -> None:
    box = load_tools([add], workers=1)
    box.close()
    box.close()
    with pytest.raises(ToolExecutorError, match="closed"):
        run_tool(box, {"name": "add", "arguments": {"a": 1, "b": 1}})


def test_a_tool_in_this_process_that_overruns_is_answered_too() -> None:
    @tool(in_process=True, timeout=0.2)
    def slow() -> str:
        """Sleep."""
        time.sleep(5)
        return ""

    @tool(in_process=True, timeout=0.2)
    async def slow_async() -> str:
        """Sleep."""
        await asyncio.sleep(30)
        return ""

    with load_tools([slow, slow_async]) as box:
        results = call_all(box, attempt("slow"), attempt("slow_async"))
    assert [result.error for result in results] == [ToolErrorKind.TIMEOUT] * 2


def test_a_file_that_never_finishes_importing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slow_tools.py"
    path.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(PluginError, match=r"slow_tools.py.*0.7"):
        load_tools(path, load_timeout_s=0.7)


def test_a_file_whose_import_ends_the_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fatal_tools.py"
    path.write_text("import os\nprint('goodbye', flush=True)\nos._exit(9)\n")
    with pytest.raises(PluginError, match=r"(?s)fatal_tools.py.*goodbye"):
        load_tools(path)


def test_a_file_that_starts_a_thread_is_not_forked_but_works(tmp_path: Path) -> None:
    path = tmp_path / "threaded_tools.py"
    path.write_text(
        "import threading, time, os\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "def threads() -> int:\n    '''Count the threads that the file started.'''\n"
        "    return sum(t.name.startswith('Thread-') for t in threading.enumerate())\n"
        "def die() -> str:\n    '''Die.'''\n    os._exit(1)\n"
        "TOOL_FUNCTIONS = [threads, die]\n"
    )
    with load_tools(path, workers=1) as box:
        assert run_tool(box, {"name": "threads"}).content == "1"  # a fork would have lost it
        assert run_tool(box, {"name": "die"}).error is ToolErrorKind.DIED
        assert run_tool(box, {"name": "threads"}).content == "1"


def test_a_fork_of_the_trainer_is_told_so_instead_of_waiting() -> None:
    code = f"""
import asyncio, os
from toolgrpo.errors import ToolExecutorError
from toolgrpo.tools import load_tools
from toolgrpo.tools.toolbox import parse_call
box = load_tools({str(MATH)!r}, workers=1)
attempts = [parse_call({{"name": "subtract", "arguments": {{"a": 3, "b": 1}}}})]
pid = os.fork()
if pid == 0:
    try:
        asyncio.run(box.session({{}}).call(attempts))
    except ToolExecutorError as error:
        os._exit(7 if "loaded by another process" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), asyncio.run(box.session({{}}).call(attempts))[0].content)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["7", "2"], done.stderr


def test_values_that_cannot_be_are_refused() -> None:
    for options in ({"tool_timeout_s": 0}, {"workers": 0}, {"memory_mb": -1}, {"max_result_chars": 0}):
        with pytest.raises(ConfigError, match="must be"):
            load_tools([add], **options)  # type: ignore[arg-type]  # mypy cannot see which keyword is which


def test_unchecked_arguments_reach_the_tool_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "open.py").write_text(
        "from toolgrpo.tools import tool\n"
        "SCHEMA = {'type': 'object', 'properties': {'n': {'type': 'integer', 'description': 'n'}}, 'required': ['n']}\n"
        "@tool(schema=SCHEMA, unchecked=True)\ndef show(**given) -> str:\n    '''Show.'''\n    return repr(given)\n"
        "TOOL_FUNCTIONS = [show]\n"
    )
    with load_tools(tmp_path / "open.py", workers=1) as box:
        call = {"name": "show", "arguments": {"n": "3", "other": [1]}}
        assert run_tool(box, call).content == "{'n': '3', 'other': [1]}"
        assert run_tool(box, {"name": "show", "arguments": {}}).content == "{}"
        deep: Any = 1
        for _ in range(500):
            deep = [deep]
        assert run_tool(box, {"name": "show", "arguments": {"n": deep}}).error is ToolErrorKind.BAD_ARGUMENTS
    with pytest.raises(PluginError, match=r"unchecked=True\) needs a schema"):
        tool(unchecked=True)
