"""Hostile tools: each costs its own call and nothing else.

Every case runs beside two honest calls on the same single worker, and is followed by an honest call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import all_end, has_ended

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools import Toolbox, load_tools, run_tool

pytestmark = pytest.mark.e2e

HOSTILE = Path(__file__).parents[1] / "fixtures" / "tools" / "hostile_tools.py"
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "tools.log"


@pytest.fixture(scope="module")
def toolbox(log_path: Path) -> Iterator[Toolbox]:
    with load_tools(HOSTILE, tool_timeout_s=TIMEOUT_S, workers=1, max_result_chars=1000, log_path=log_path) as box:
        yield box


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("python_loop", ToolErrorKind.TIMEOUT, "no answer within 2 s"),
        ("regex_loop", ToolErrorKind.TIMEOUT, "no answer within 2 s"),
        ("sleep_forever", ToolErrorKind.TIMEOUT, "no answer within 2 s"),
        ("async_sleep_forever", ToolErrorKind.TIMEOUT, "no answer within 2 s"),
        ("async_block", ToolErrorKind.TIMEOUT, "no answer within 2 s"),
        ("segfault", ToolErrorKind.DIED, "SIGSEGV"),
        ("exit_hard", ToolErrorKind.DIED, "exit code 3"),
        ("exit_softly", ToolErrorKind.RAISED, "SystemExit: bye"),
        ("raise_base", ToolErrorKind.RAISED, "BaseException: from below"),
        ("raise_unreadable", ToolErrorKind.RAISED, "Unreadable"),
        ("recurse", ToolErrorKind.RAISED, "RecursionError"),
        ("allocate", ToolErrorKind.RAISED, "out of memory (a tool may use 4096 MB)"),
        ("print_gigabyte", None, "printed"),
        ("print_forever", ToolErrorKind.TIMEOUT, "no answer within 2 s"),
        ("return_too_much", None, "characters left out ...]"),
        ("unserialisable", ToolErrorKind.BAD_RESULT, "returned a lock"),
        ("circular", ToolErrorKind.BAD_RESULT, "returned a list"),
        ("change_directory", None, "/"),
        ("close_descriptors", ToolErrorKind.DIED, ""),
        ("kill_parent", ToolErrorKind.DIED, ""),
        ("lone_surrogate", None, "a?b"),
        ("fork_and_return", None, ""),
    ],
)
def test_costs_its_own_call_and_nothing_else(
    toolbox: Toolbox, name: str, error: ToolErrorKind | None, says: str
) -> None:
    beside = [attempt("nap", seconds=0.4), attempt("length", words=["a", "b"])]
    before, hostile, after = call_all(toolbox, beside[0], attempt(name), beside[1])
    assert hostile.error == error, hostile.content
    assert says in hostile.content
    assert len(hostile.content) < 1200
    if name != "kill_parent":  # the one who starts workers is gone: whatever ran is gone with it
        assert (before.content, after.content) == ("slept 0.4", "2")
    assert run_tool(toolbox, {"name": "length", "arguments": {"words": ["a"] * 3}}).content == "3"
    assert run_tool(toolbox, {"name": "where"}).content == os.getcwd()


def test_nonsense_on_the_wire_is_the_death_of_its_worker_only(toolbox: Toolbox) -> None:
    (result,) = call_all(toolbox, attempt("write_nonsense"))
    assert result.error in (ToolErrorKind.DIED, ToolErrorKind.TIMEOUT)
    assert run_tool(toolbox, {"name": "polite", "arguments": {"text": "hello"}}).content == "hello"


def test_a_child_that_was_not_waited_for_ends_with_its_call(toolbox: Toolbox) -> None:
    result = run_tool(toolbox, {"name": "leave_child"})
    assert result.ok
    assert all_end(int(result.content))


def test_a_helper_that_may_stay_ends_with_its_worker() -> None:
    with load_tools(HOSTILE, tool_timeout_s=TIMEOUT_S, workers=1) as box:
        pid = int(run_tool(box, {"name": "start_helper"}).content)
        assert run_tool(box, {"name": "polite", "arguments": {"text": "x"}}).ok
        assert not has_ended(pid)
        assert run_tool(box, {"name": "exit_hard"}).error is ToolErrorKind.DIED
        assert all_end(pid)


def test_a_daemon_that_left_everything_ends_too(toolbox: Toolbox, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    result = run_tool(toolbox, {"name": "leave_daemon", "arguments": {"path": str(path)}})
    assert result.content == "gone"
    assert all_end(int(path.read_text()))


def test_a_call_that_freezes_its_worker_has_its_deadline_and_those_behind_it_do_not_wait(toolbox: Toolbox) -> None:
    """Sent first, so that it alone has begun when the worker falls silent: its own process decides, not the silence."""
    frozen, *others = call_all(toolbox, attempt("regex_loop"), *[attempt("length", words=["a"])] * 8)
    assert frozen.error is ToolErrorKind.TIMEOUT, frozen.content
    assert [other.content for other in others] == ["1"] * 8


def test_isolated_calls_have_a_process_each(toolbox: Toolbox) -> None:
    results = call_all(toolbox, *(attempt("isolated_process_id") for _ in range(4)), attempt("process_id"))
    assert len({result.content for result in results}) == 5


def test_the_log_is_bounded_and_holds_what_tools_printed(toolbox: Toolbox, log_path: Path) -> None:
    run_tool(toolbox, {"name": "print_gigabyte"})
    size = log_path.stat().st_size
    assert 0 < size <= 17 * 1024 * 1024
    assert b"the limit of this log is reached" in log_path.read_bytes()[-200:]


def test_nothing_is_left_running_after_close() -> None:
    with load_tools(HOSTILE, tool_timeout_s=TIMEOUT_S, workers=2) as box:
        pid = int(run_tool(box, {"name": "process_id"}).content)
        call_all(box, attempt("sleep_forever"), attempt("leave_child"))
    assert all_end(pid)
