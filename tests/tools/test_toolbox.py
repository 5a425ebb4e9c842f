"""The toolbox over real worker processes: calls, order, limits, caching, loops that come and go."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind
from toolgrpo.errors import ConfigError, PluginError, ToolExecutorError
from toolgrpo.tools import Toolbox, load_tools, run_tool, tool
from toolgrpo.tools.backends import CacheLookup, ResultCache
from toolgrpo.tools.base import Reply

pytestmark = pytest.mark.filterwarnings("ignore:the model will see only")
MATH = Path(__file__).parents[2] / "tools_funcs" / "arithmetic_tools.py"


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def nap(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


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
    tools: list[Callable[..., Any]] = [add, nap, count_runs, stop, worker_id, meet, long_text]
    with load_tools(tools, workers=2, tool_timeout_s=120, max_result_chars=100) as box:
        yield box


def test_calls_of_one_turn_run_at_the_same_time(toolbox: Toolbox, tmp_path: Path) -> None:
    """Each waits for all others: one after the other they would wait until they are given up."""
    results = call_all(toolbox, *(attempt("meet", folder=str(tmp_path), number=i, all_of=40) for i in range(40)))
    assert [result.content for result in results] == ["met"] * 40


def test_workers_outlive_the_loops_that_use_them(toolbox: Toolbox) -> None:
    ids = {result.content for _ in range(5) for result in call_all(toolbox, attempt("worker_id"))}
    assert len(ids) <= 2 and str(os.getpid()) not in ids


def family() -> list[Any]:
    """Say what this process inherited, and who started it."""
    print("a tool speaks")
    print("a tool complains", file=sys.stderr)
    return [hasattr(sys, "of_the_trainer"), os.getpid(), os.getppid()]


def test_workers_start_clean_and_what_tools_print_goes_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "of_the_trainer", True, raising=False)
    log = tmp_path / "tools.log"
    with load_tools([family], workers=1, log_path=log) as box:
        inherited, worker, parent = json.loads(run_tool(box, {"name": "family"}).content)
    assert inherited is False  # a fork of the trainer would have it
    assert len({os.getpid(), worker, parent}) == 3  # the parent is the supervisor, not the trainer
    assert "a tool" not in "".join(capfd.readouterr())
    assert "a tool speaks" in log.read_text() and "a tool complains" in log.read_text()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', None),
        ({"name": "add", "arguments": {"a": "1", "b": 2.0}}, None),
        ({"name": "add", "arguments": '{"a": 1, "b": 2}'}, None),
        ({"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}, None),
        ("not json", ToolErrorKind.INVALID_JSON),
        ("[" * 100_000, ToolErrorKind.INVALID_JSON),
        (None, ToolErrorKind.INVALID_JSON),
        ({"name": 7}, ToolErrorKind.MISSING_NAME),
        ({"name": "ad"}, ToolErrorKind.UNKNOWN_TOOL),
        ({"name": "add", "arguments": [1, 2]}, ToolErrorKind.BAD_ARGUMENTS),
        ({"name": "add", "arguments": "1, 2"}, ToolErrorKind.INVALID_JSON),
        ({"name": "add"}, ToolErrorKind.BAD_ARGUMENTS),
        ({"name": "stop", "arguments": {"well": False}}, ToolErrorKind.RAISED),
    ],
)
def test_run_tool_answers_what_a_model_can_write(toolbox: Toolbox, call: object, error: ToolErrorKind | None) -> None:
    result = run_tool(toolbox, call)
    assert result.error == error and result.ok == (error is None), result.content
    assert result.content == "3" if error is None else result.content.startswith("Error: ")
    assert len(result.content) < 1100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from("ab"), inner, max_size=4),
    max_leaves=12,
)
NAMED = st.fixed_dictionaries(
    {"name": st.sampled_from(["add", "stop", "ad", "", "add "]) | st.text(), "arguments": JSON}
)


@pytest.mark.property
@settings(max_examples=200)
@given(call=st.text() | JSON | NAMED, as_text=st.booleans())
def test_whatever_a_model_writes_has_one_bounded_answer(toolbox: Toolbox, call: Any, as_text: bool) -> None:
    result = run_tool(toolbox, json.dumps(call) if as_text else call)
    assert len(result.content) < 1100 and result.content.encode("utf-8")  # a tokenizer can read it
    assert result.ok or result.content.startswith("Error: ")


def test_the_form_of_a_call_is_shown_with_a_whole_call_in_it_and_the_nearest_name(toolbox: Toolbox) -> None:
    broken = CallAttempt(AttemptStatus.INVALID_JSON, "{", detail='a call is {"name": ..., "arguments": {...}}')
    for call in (broken, "add, please"):
        shown = run_tool(toolbox, call).content
        assert '{"name": "add", "arguments": {"a": 3, "b": 3}}' in shown and "..." not in shown
    assert "did you mean 'add'?" in run_tool(toolbox, {"name": "Add"}).content


def test_a_stop_tool_ends_the_episode_only_when_it_went_well_and_a_long_result_is_cut(toolbox: Toolbox) -> None:
    good, bad, cut = call_all(
        toolbox, attempt("stop", well=True), attempt("stop", well=False), attempt("long_text", n=1000)
    )
    assert (good.ends_episode, bad.ends_episode) == (True, False)
    assert cut.truncated and cut.left_out == 900 and "\n[... 900 characters left out ...]\n" in cut.content


def test_a_pure_tool_is_asked_once(toolbox: Toolbox, tmp_path: Path) -> None:
    path = str(tmp_path / "runs")
    results = call_all(toolbox, *(attempt("count_runs", path=path) for _ in range(5)))
    results += call_all(toolbox, attempt("count_runs", path=path))
    assert [result.content for result in results] == ["1"] * 6
    first, *others = sorted(results, key=lambda result: result.cached)
    assert not first.cached and all(result.cached for result in others)
    assert results[-1].duration_s != first.duration_s  # the time of this answer, not of the call it repeats


def test_an_episode_that_is_cancelled_leaves_the_tools_in_order_and_run_tool_works_in_a_loop(toolbox: Toolbox) -> None:
    async def run() -> list[str]:
        async with toolbox.session({}) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.call([attempt("nap", seconds=30)]), 0.05)
            (result,) = await session.call([attempt("add", a=2, b=2)])
        return [result.content, run_tool(toolbox, {"name": "add", "arguments": {"a": 1, "b": 1}}).content]

    assert asyncio.run(run()) == ["4", "2"]


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


@pytest.mark.parametrize(
    ("text", "timeout_s", "says"),
    [
        ("import time\ntime.sleep(1000)", 0.7, r"bad_tools.py.*0.7"),
        ("import os\nprint('goodbye', flush=True)\nos._exit(9)", 60.0, r"(?s)bad_tools.py.*goodbye"),
    ],
)
def test_an_import_that_never_ends_or_ends_all_is_refused(
    tmp_path: Path, text: str, timeout_s: float, says: str
) -> None:
    path = tmp_path / "bad_tools.py"
    path.write_text(text)
    with pytest.raises(PluginError, match=says):
        load_tools(path, load_timeout_s=timeout_s)


def test_a_file_that_starts_a_thread_is_not_forked_but_works_until_it_is_closed(tmp_path: Path) -> None:
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
    box.close()  # a second time
    with pytest.raises(ToolExecutorError, match="closed"):
        run_tool(box, {"name": "threads"})


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
        deep = json.loads("[" * 500 + "]" * 500)
        assert run_tool(box, {"name": "show", "arguments": {"n": deep}}).error is ToolErrorKind.BAD_ARGUMENTS
    with pytest.raises(PluginError, match=r"unchecked=True\) needs a schema"):
        tool(unchecked=True)


# The cache of pure tools' answers: what stays, and what a long run keeps in memory.


def ask(cache: ResultCache, number: int, reply: Reply | Exception | None) -> CacheLookup:
    """A call of a tool; None: it is still running."""

    def run() -> Future[Reply]:
        future: Future[Reply] = Future()
        if isinstance(reply, Exception):
            future.set_exception(reply)
        elif reply is not None:
            future.set_result(reply)
        return future

    return cache.get("double", {"n": number}, run)


@pytest.mark.parametrize("bad", [Reply("no", ToolErrorKind.RAISED), RuntimeError("gone")])
def test_only_good_answers_stay(bad: Reply | Exception) -> None:
    cache = ResultCache()
    ask(cache, 1, bad)
    again = ask(cache, 1, Reply("2"))
    assert not again.hit and again.future.result(timeout=0).text == "2"
    cancelled = ask(cache, 3, None)
    cancelled.future.cancel()
    assert not ask(cache, 3, Reply("6")).hit


def test_the_least_recently_used_answers_go_first_and_their_text_is_bounded() -> None:
    cache = ResultCache(max_entries=2)
    for number in (1, 2, 1, 3):
        ask(cache, number, Reply(str(number)))
    assert len(cache) == 2
    assert [ask(cache, number, Reply("")).hit for number in (1, 3, 2)] == [True, True, False]
    cache = ResultCache(max_chars=1000)
    for number in range(50):
        ask(cache, number, Reply("x" * 200))
    assert len(cache) == 4
    ask(cache, 50, Reply("x" * 2000))
    assert len(cache) == 0, "one that is longer than all the room is not kept"
    ask(cache, 51, Reply("x" * 200))
    assert ask(cache, 51, Reply("")).hit


def test_an_answer_that_stays_keeps_no_event_loop_alive() -> None:
    """Each rollout has a loop of its own; a run of many steps would keep them all."""
    cache = ResultCache()

    async def waits_for_a_running_call() -> weakref.ref[asyncio.AbstractEventLoop]:
        lookup = ask(cache, 1, None)
        waiting = asyncio.wrap_future(lookup.future)
        lookup.future.set_result(Reply("2"))
        assert (await waiting).text == "2"
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(waits_for_a_running_call())
    gc.collect()
    assert len(cache) == 1 and loop() is None
