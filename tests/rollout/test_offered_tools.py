"""Per-row tools: only what a row names is shown and can be called."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import DataError
from toolgrpo.rollout.row_parts import OFFERED, as_messages, check_tool_names, offered_tools, rows_without_their_tools
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedTools, run_episode
from toolgrpo.tools import load_tools

BOTH = 'call add {"a": 1, "b": 2}\ncall sub {"a": 1, "b": 2}\ncall add {"a": 3, "b": 4}'


def run(row: dict[str, Any], turns: list[str]) -> tuple[Trajectory, ScriptedTools]:
    tools = ScriptedTools({"add": lambda a, b: str(a + b), "sub": lambda a, b: str(a - b)})
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns], max_model_len=4096)
    return run_episode(engine, tools, row=row, clock=FakeClock()), tools


def shown(trajectory: Trajectory) -> str:
    return ByteChat.text(trajectory.prompt_ids).partition(">")[0]


def test_parts_of_text_are_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_messages([{"role": "user", "content": parts}]) == ({"role": "user", "content": "ab"},)


@pytest.mark.parametrize("row", [{}, {"tools": None}])
def test_a_row_without_names_has_all_tools(row: dict[str, Any]) -> None:
    trajectory, _ = run(row, [BOTH, "7"])
    assert shown(trajectory) == "tools:add,sub"
    assert [r.content for r in trajectory.results] == ["3", "-1", "7"]


def test_a_row_sees_and_calls_only_the_tools_it_names() -> None:
    trajectory, tools = run({"tools": ["add"]}, [BOTH, "7"])
    assert shown(trajectory) == "tools:add"
    assert [r.error for r in trajectory.results] == [None, ToolErrorKind.UNKNOWN_TOOL, None], "in call order"
    assert [r.content for r in trajectory.results][::2] == ["3", "7"]
    assert "'sub'. The tools are: add." in trajectory.results[1].content
    assert [name for name, _ in tools.calls] == ["add", "add"], "the hidden tool is never reached"
    assert tools.closed_sessions == 1 and tools.open_sessions == 0


def test_a_broken_call_is_corrected_with_a_tool_that_the_row_sees() -> None:
    broken = CallAttempt(AttemptStatus.INVALID_JSON, "{", detail='a call is {"name": ..., "arguments": {...}}')

    def first(n: int = 1) -> str:
        """Hidden."""
        return "x"

    def second(n: int = 1) -> str:
        """Shown."""
        return "x"

    with load_tools([first, second]) as toolbox:
        for row in ({"tools": ["second"]}, {"hidden_tools": ["first"]}):
            with toolbox.session(row) as session:
                (told,) = toolbox.wait_for(session.call([broken]))
            assert '"name": "second"' in told.content and "first" not in told.content


def test_a_row_can_have_no_tool_at_all() -> None:
    trajectory, tools = run({"tools": []}, ['call add {"a": 1, "b": 2}', "3"])
    assert shown(trajectory) == "tools:"
    assert "There are no tools for this question" in trajectory.results[0].content
    assert tools.calls == [] and trajectory.stop_reason is StopReason.FINISHED


def test_a_name_that_no_tool_has_is_an_error_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"'ad'.*'add'"):
        run({"tools": ["ad"]}, ["7"])
    with pytest.raises(DataError, match="no tools were loaded"):
        offered_tools(None, {"tools": ["add"]})
    with pytest.raises(DataError, match=r"row 5 .*'ad'"):
        check_tool_names(None, ["ad"], row="row 5")


def test_hidden_tools_can_be_called_and_are_not_shown() -> None:
    for offered in (["add"], None):
        trajectory, _ = run({"tools": offered, "hidden_tools": ["sub"]}, [BOTH, 'call mul {"a": 1}', "7"])
        assert shown(trajectory) == "tools:add"
        assert [r.content for r in trajectory.results[:3]] == ["3", "-1", "7"]
        assert "The tools are: add." in trajectory.results[3].content, "nor is it named"
    with pytest.raises(DataError, match="`hidden_tools`"):
        run({"hidden_tools": ["mul"]}, [])


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("tools", ["add", "ad"]),
        ("hidden_tools", ["ad"]),
        ("expected_tools", ["ad"]),
        ("gold_calls", '[{"name": "add", "arguments": {}}, {"name": "ad", "arguments": {"a": 1}}]'),
        ("gold_calls", [{"name": "ad", "arguments": {"a": 1}}]),
    ],
)
def test_every_row_that_names_a_tool_which_is_not_there_is_found(column: str, cell: Any) -> None:
    tools = ScriptedTools({"add": str, "sub": str})
    rows = Dataset.from_list([{column: None}, {column: cell}, {column: cell}])
    said = f"names the tool 'ad' in its column `{column}`, but there is no such tool; the nearest is 'add'"
    assert rows_without_their_tools(tools, rows) == {1: said, 2: said}
    assert rows_without_their_tools(ScriptedTools({"add": str, "ad": str}), rows) == {}
    assert (1 in rows_without_their_tools(None, rows, OFFERED)) == (column in OFFERED)
    assert "no tools were loaded" in rows_without_their_tools(None, rows)[1]


@pytest.mark.parametrize("cell", [[{"type": "function", "function": {"name": "add"}}], '["add"]'])
def test_a_column_of_schemas_or_of_text_offers_nothing(cell: Any) -> None:
    """TRL's rows have schemas in `tools`, and a table may hold lists as text: only names of loaded tools choose."""
    found = rows_without_their_tools(ScriptedTools({"add": str}), Dataset.from_list([{"tools": cell}]))
    assert "has no list of names of loaded tools in its column `tools`" in found[0]


@pytest.mark.parametrize("value", ["add", "[", "7", 7, [7], [None], [], "[" * 100_000, '[{"tool": "add"}]'])
def test_cells_of_other_forms_name_no_tool(value: Any) -> None:
    for column in ("expected_tools", "gold_calls"):
        assert rows_without_their_tools(ScriptedTools({}), Dataset.from_dict({column: [value]})) == {}
