"""The tools that nano is measured with and was not trained on: what is held out, and that every question has its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _tool_families import Suite, conversations, in_files, invented, questions, suites, synonyms, write

from recipes.nano.toolsets import PARAMETERS, SYNONYMS, is_held_out
from toolgrpo.tools import load_tools, run_tool

SUITES = {suite.name: suite for suite in suites(24)}


def test_what_is_held_out_is_in_no_training() -> None:
    asked = {name for one in ("new", "invented", "unheard") for name in (tool.name for tool in SUITES[one].tools)}
    taught = {tool.name for seed in (0, 1, 42) for tool in invented(400, seed)}
    assert not asked & taught and not asked & {name for names in SYNONYMS.values() for name in names}
    parameters = {tool.parameters for one in ("new", "invented", "reordered") for tool in SUITES[one].tools}
    assert not parameters & set(PARAMETERS)
    assert all(is_held_out(row["tools"]) for row in SUITES["renamed"].rows)


def test_a_file_has_one_signature_for_a_name_and_offers_each_row_its_own() -> None:
    files = in_files(list(SUITES.values()))
    assert [name for name, _, _ in files] == ["seen", "reordered"]
    assert sum(len(rows) for _, _, rows in files) == 6 * 24
    for _, tools, rows in files:
        names = [tool.name for tool in tools]
        assert len(set(names)) == len(names)
        assert all(len(row["tools"]) in (4, 12) and set(row["tools"]) <= set(names) for row in rows)


@pytest.mark.parametrize("suite", [SUITES["new"], SUITES["invented"]], ids=lambda suite: suite.name)
def test_the_calls_of_a_question_give_its_answer(suite: Suite, tmp_path: Path) -> None:
    plugin, data = write(tmp_path, suite.name, suite.tools, suite.rows)
    assert len(data.read_text().splitlines()) == 24
    by_name = {tool.name: tool for tool in suite.tools}
    with load_tools(str(plugin)) as toolbox:
        schemas = dict(zip(toolbox.names, toolbox.schemas, strict=True))
        for row, taught in zip(suite.rows, conversations(suite.tools, suite.rows, schemas), strict=True):
            for call in row["calls"]:
                arguments = dict(zip(by_name[call["tool"]].parameters, (call["left"], call["right"]), strict=True))
                result = run_tool(toolbox, json.dumps({"name": call["tool"], "arguments": arguments}))
            assert result.ok and result.content == row["answer"]
            assert taught["messages"][-1]["content"] == f"The answer is {row['answer']}."
            assert {schema["function"]["name"] for schema in taught["tools"]} == set(row["tools"])


def test_another_order_of_parameters_means_the_same(tmp_path: Path) -> None:
    suite = SUITES["reordered"]
    plugin, _ = write(tmp_path, "reordered", suite.tools, suite.rows)
    with load_tools(str(plugin)) as toolbox:
        assert toolbox.names == ["divide", "multiply", "subtract", "add"]
        subtract = next(tool for tool in suite.tools if tool.name == "subtract")
        arguments = dict(zip(subtract.parameters, (9, 4), strict=True))
        assert run_tool(toolbox, {"name": "subtract", "arguments": arguments}).content == "5"
        shown = toolbox.schemas[2]["function"]["parameters"]["properties"]
        assert list(shown) == list(reversed(subtract.parameters))


def test_questions_and_names_come_from_their_seed() -> None:
    tools = invented(12, 3)
    assert tools == invented(12, 3) != invented(12, 4)
    assert questions(tools, 9, "a") == questions(tools, 9, "a") != questions(tools, 9, "b")
    assert synonyms(1) == synonyms(1) != synonyms(2)


def test_the_seen_tools_look_as_those_of_the_training(tmp_path: Path) -> None:
    plugin, _ = write(tmp_path, "seen", SUITES["seen"].tools, SUITES["seen"].rows)
    with load_tools(str(plugin)) as seen, load_tools("tools_funcs/arithmetic_tools.py") as trained:
        assert seen.schemas == trained.schemas
