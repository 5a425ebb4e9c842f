"""Real workers: what is drawn, what is left out and why, and that a second run gives the same."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.draw.test_arguments import spec
from toolgrpo.draw.play import PlayedCall, Program, may_be_played, try_tools
from toolgrpo.draw.rows import ToolRows, _split, _taken, _task, draw_rows
from toolgrpo.errors import PluginError
from toolgrpo.tools import Toolbox, load_tools, run_tool

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:the model will see only")]
ROOT = Path(__file__).parents[2]
TOOLSETS = ROOT / "tests" / "fixtures" / "toolsets"
LIBRARY = {"mcpServers": {"library": {"command": sys.executable, "args": [str(TOOLSETS / "mcp_library.py")]}}}


def opening(path: Path) -> Callable[[], Toolbox]:
    return partial(load_tools, path, tool_timeout_s=20, workers=2)


def tools_file(folder: Path, text: str) -> Path:
    path = folder / "some_tools.py"
    path.write_text(text)
    return path


def names_of(drawn: ToolRows) -> Counter[str]:
    rows = (*drawn.train, *drawn.held_out)
    return Counter(call["name"] for row in rows for call in json.loads(row["gold_calls"]))


@pytest.mark.parametrize("name", ["inventory", "orders", "texts", "number_tools"])
def test_toolsets_in_other_styles_give_rows_for_every_tool_that_answers_the_same(name: str) -> None:
    drawn = draw_rows(opening(TOOLSETS / f"{name}.py"), n_rows=60)
    left_out = {tool: one.out for tool, one in drawn.played.items() if one.out}
    changing = {"number_tools": {"seconds_since_epoch", "roll"}, "texts": {"take_note"}}.get(name, set())
    assert left_out.keys() == changing and all("same twice" in why for why in left_out.values())
    assert names_of(drawn).keys() == drawn.played.keys() - changing
    assert len(drawn.train) + len(drawn.held_out) >= 50 and drawn.held_out


def test_every_row_gives_its_answer_in_workers_that_never_saw_it() -> None:
    drawn = draw_rows(opening(TOOLSETS / "orders.py"), n_rows=40)
    rows = [*drawn.train, *drawn.held_out]
    assert any(" then " in row["task"] for row in rows)
    with opening(TOOLSETS / "orders.py")() as toolbox:
        for row in rows:
            results = [run_tool(toolbox, call) for call in json.loads(row["gold_calls"])]
            assert all(result.ok for result in results) and results[-1].content == row["answer"]
    for column in ("prompt", "gold_calls"):
        trained, held_out = ({row[column] for row in some} for some in (drawn.train, drawn.held_out))
        assert trained.isdisjoint(held_out), "held-out rows have other words and other values"
    trained = {json.dumps(call) for row in drawn.train for call in json.loads(row["gold_calls"])}
    alone = [json.loads(row["gold_calls"]) for row in drawn.held_out if " " not in row["task"]]
    assert alone and trained.isdisjoint(json.dumps(call) for calls in alone for call in calls), (
        "in no composition either"
    )
    tasks = [{row["task"] for row in some if " " in row["task"]} for some in (drawn.train, drawn.held_out)]
    assert tasks[0].isdisjoint(tasks[1]), "and other compositions"


def test_held_out_compositions_stand_in_no_longer_one_that_is_trained_on() -> None:
    specs = [spec({"x": {"type": "integer"}}, name) for name in ("add", "double", "square", "total")]

    def program(*chosen: int) -> Program:
        return tuple(PlayedCall(specs[one], {"x": place}) for place, one in enumerate(chosen))

    programs = [program(*some) for n in (1, 2, 3) for some in itertools.product(range(4), repeat=n)]
    for seed in range(10):
        train, held_out = _split(programs, random.Random(seed), 60, ())
        inside = {_task(one[i : i + 2]) for one in train for i in range(len(one) - 1)}
        assert inside.isdisjoint(_task(one) for one in held_out if len(one) > 1) and any(len(one) > 2 for one in train)


def test_programs_beyond_what_a_pass_wants_are_there_for_the_next() -> None:
    pairs: dict[str, list[Any]] = {str(number): [(number, number)] for number in range(20)}  # of compositions
    assert len(_taken(pairs, 16)) == 16 and sum(map(len, pairs.values())) == 4


def test_some_chain_is_left_to_train_on() -> None:
    """The only kind of chain there is, and one that has it in it, among compositions without links."""

    def call(name: str, value: int, link: str = "") -> PlayedCall:
        return PlayedCall(spec({"a": {}}, name, name), {"a": value}, result=str(value), links={"a": ""} if link else {})

    both = [(call(a, n), call(b, n)) for a in "fgh" for b in "fgh" if a != b for n in range(3)]
    chains = [(call("f", n), call("g", n, "f")) for n in range(3)]
    programs = [*both, *chains, *((call("h", 7), *chain) for chain in chains)]
    for seed in range(20):
        train, held_out = _split(programs, random.Random(seed), 40, ())
        tasks, away = ({_task(one) for one in some} for some in (train, held_out))
        assert "f then g" in tasks and away.isdisjoint(tasks)


def test_a_tool_that_is_held_out_is_in_no_training_row() -> None:
    drawn = draw_rows(opening(ROOT / "tools_funcs" / "math_tools.py"), n_rows=40, hold_out=["divide"])
    assert not any("divide" in row["gold_calls"] for row in drawn.train)
    assert any("divide" in row["gold_calls"] for row in drawn.held_out)


def test_registered_values_are_drawn_and_a_tool_that_never_answers_is_named_with_the_line_that_helps(
    tmp_path: Path,
) -> None:
    text = '''
def price(isin: str) -> int:
    """Price of a security."""
    return len(isin) if isin.startswith("XS0") else int("not known")

def page(path: str) -> str:
    """A page of the site."""
    return "<!DOCTYPE html><html></html>"

TOOL_FUNCTIONS = [price, page]
'''
    drawn = draw_rows(opening(tools_file(tmp_path, text)), n_rows=10)
    assert 'EXAMPLES = {"isin": [...]} would help' in drawn.played["price"].out
    assert "ValueError: invalid literal" in drawn.played["price"].out
    assert "it answers HTML, a page for people" in drawn.played["page"].out
    registered = tools_file(tmp_path, f'{text}\nEXAMPLES = {{"isin": [f"XS0{{n}}" for n in range(9, 30)]}}\n')
    drawn = draw_rows(opening(registered), n_rows=10)
    assert names_of(drawn).keys() == {"price"} and "XS0" in drawn.train[0]["prompt"]


def test_examples_of_another_form_and_tools_without_docstring_or_type_are_one_sentence_each(tmp_path: Path) -> None:
    text = 'def f(a):\n    "F."\n\ndef g(a: int) -> int:\n    return a\n\ndef h(a: int) -> int:\n    "H."\n\nTOOL_FUNCTIONS = '
    with pytest.raises(PluginError, match=r"EXAMPLES in .* must be a dict of lists"):
        load_tools(tools_file(tmp_path, f'{text}[h]\nEXAMPLES = {{"a": 3}}\n'))
    with pytest.raises(PluginError) as raised:
        load_tools(tools_file(tmp_path, f"{text}[f, g, h]\n"))
    said = str(raised.value).splitlines()
    assert "tool 'f': parameter 'a' has no annotation" in said[0] and "tool 'g': no docstring" in said[1]
    assert said[2:] == ["The others are fine: h."]


@pytest.mark.contract
def test_a_server_is_asked_only_for_what_it_marks_as_reading() -> None:
    drawn = draw_rows(partial(load_tools, mcp_config=LIBRARY, tool_timeout_s=60), n_rows=20)
    assert "does not mark it readOnlyHint" in drawn.played["lend_book"].out
    assert drawn.played["lend_book"].drawer.calls == 0
    assert names_of(drawn).keys() == {"list_books", "year_of_book"}
    spec = drawn.played["lend_book"].spec
    assert not may_be_played(spec, allow_writes=False) and may_be_played(spec, allow_writes=True)


def test_a_random_agent_finds_what_crashes_hangs_is_large_or_changes(tmp_path: Path) -> None:
    bodies = {  # of a function of one number
        "sums": "return a + 1",
        "bug": "return a.upper()",
        "dies": "os._exit(3)",
        "hangs": "time.sleep(600)",
        "large": 'return "x" * 200_000',
        "changes": "return random.random()",
        "needs": 'raise ValueError("no")',
    }
    imports = "import os, random, time\nfrom toolgrpo.tools import tool"
    tools_of = "".join(f'def {name}(a: int) -> str:\n    """Do it."""\n    {body}\n\n' for name, body in bodies.items())
    text = f"{imports}\n\n{tools_of}\nhangs = tool(timeout=0.2)(hangs)\nTOOL_FUNCTIONS = [{', '.join(bodies)}]\n"
    tools = opening(tools_file(tmp_path, text))
    with tools() as first, tools() as again:
        found = try_tools(first, again, {}, seed=1, allow_writes=False)
    kinds = {(fault.tool, fault.kind) for fault in found.faults}
    kinds = {(tool, kind) for tool, kind in kinds if kind != "slow"}  # on a busy machine any may be
    assert kinds == {("bug", "raises"), ("dies", "dies"), ("hangs", "hangs"), ("large", "big"), ("changes", "changes")}
    assert {name for name, n in found.answered.items() if not n} == {"bug", "dies", "hangs", "needs"}
