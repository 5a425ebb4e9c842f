"""The reward files that are shipped, and that the example data has the answers its tools give."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.rewards import load_reward
from toolgrpo.rewards.base import Score
from toolgrpo.tools import load_tools, run_tool

REPOSITORY = Path(__file__).resolve().parents[2]


def episode(*calls: tuple[str, str, bool]) -> Trajectory:
    turns = []
    for name, text, ok in calls:
        result = ToolResult(text, name, None if ok else ToolErrorKind.RAISED)
        turns.append(Turn(0, 0, "", None, (CallAttempt(AttemptStatus.OK, "", name, {}),), (result,)))
    return Trajectory((1,), (), (), (), (), tuple(turns), StopReason.FINISHED)


def score(name: str, text: str, trajectory: Trajectory, **columns: Any) -> Score:
    reward = load_reward(REPOSITORY / "rewards" / name)
    columns = {key: [value] for key, value in columns.items()}
    (value,) = reward(completions=[[{"role": "assistant", "content": text}]], trajectories=[trajectory], **columns)
    return value


def test_helpers_of_one_name_are_each_file_s_own(tmp_path: Path) -> None:
    rewards = []
    for name in ("0.0", "1.0"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "scoring_of_test.py").write_text(f"SCORE = {name}\n")
        text = "from scoring_of_test import SCORE\ndef reward_func(completions, **kwargs): return [SCORE] * len(completions)\n"
        (folder / "my_reward.py").write_text(text)
        rewards.append(load_reward(folder / "my_reward.py"))
    assert [reward(completions=[[]]) for reward in rewards] == [[0.0], [1.0]]


def test_helpers_that_are_imported_later_are_each_file_s_own_and_one_module(tmp_path: Path) -> None:
    for name in ("a", "b"):
        package = tmp_path / name / "common_of_test"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"NAME, SEEN = {name!r}, []\n")
        text = "import common_of_test\ndef reward_func(completions, **kwargs):\n    common_of_test.SEEN.append(1)\n"
        text += (
            "    import common_of_test as later\n    return [float(len(later.SEEN)) if later.NAME == 'a' else 0.0]\n"
        )
        for file in ("one.py", "two.py"):
            (tmp_path / name / file).write_text(text)
    first, other = load_reward(tmp_path / "a" / "one.py"), load_reward(tmp_path / "b" / "one.py")
    second = load_reward(tmp_path / "a" / "two.py")
    assert [one.function(completions=[[]]) for one in (first, second)] == [[1.0], [2.0]], "one module, of their folder"
    assert sys.modules[other.function.__module__].common_of_test.NAME == "b"


def test_math_reward() -> None:
    worked, failed = episode(("calculator", "8", True)), episode(("calculator", "Error", False))
    assert score("math_reward.py", "It is **1,000**.", episode(), answer="1000") == 1.0
    assert score("math_reward.py", "It is 7.", worked, answer="8") == 0.2
    assert score("math_reward.py", "", failed, answer="8") == 0.05
    assert score("math_reward.py", "no number", episode(), answer="8") == 0.0


TOLD = (
    "It comes to $61,652.72 in all.",
    "The payment is 395.21, and the total paid is 61652.72.",
    "Each month you owe 395.21;\nthe total is 61652.72 after 13 years.",
)
NOT_TOLD = (
    "The result is: payment 395.21, over 13 years, total paid 61652.72",
    "<tool_response>\npayment 395.21, total paid 61,652.72\n</tool_response>",
    "<tool_response>You pay 395.21 a month.",
    '{"the loan is paid by": 395.21}',
    *("You pay **395.21** a month.", "- you pay 395.21 a month", "```\nYou pay 395.21 a month.\n```"),
    "Payment: 395.21",  # no words of its own
    "A loan of 51000 over 13 years is what you asked for.",  # the question's own numbers
    "You pay 395.3 a month.",
    "",  # it called once more
)


def of_result(text: str, *prompt: dict[str, str]) -> Score:
    return score("result_in_answer.py", text, episode(), prompts=list(prompt))


@pytest.mark.parametrize("text", [*TOLD, *NOT_TOLD])
def test_what_the_tool_said_has_to_be_told_in_a_sentence(text: str) -> None:
    asked = {"role": "user", "content": "What is the payment on 51000 over 13 years?"}
    result = {"role": "tool", "content": "payment 395.21, over 13 years, total paid 61652.72"}
    assert of_result(text, asked, result) == float(text in TOLD)
    assert of_result(text, asked) == of_result(text, asked, result, asked) == 0.0, "no tool has said it"


def test_a_short_result_is_told_and_an_error_is_none() -> None:
    asked, result = {"role": "user", "content": "What is it?"}, {"role": "tool", "content": "47"}
    assert of_result("Together they have 47 apples today.", asked, result) == 1.0, "it can only be told by itself"
    assert of_result("47", asked, result) == 0.0
    error = {"role": "tool", "content": "Error: loan: years must be over 0 and at most 100"}
    assert of_result("The years of this loan must be at most 100.", asked, error) == 0.0


def test_the_worked_questions_of_the_recipe_end_as_the_reward_wants() -> None:
    reward = load_reward(REPOSITORY / "rewards" / "result_in_answer.py")
    rows = [json.loads(line) for line in (REPOSITORY / "recipes/data/financial_generated_train.jsonl").open()]
    shown = [row["prompt"] for row in rows]
    scores = reward(completions=[prompt[3:4] for prompt in shown], prompts=[prompt[:3] for prompt in shown])
    assert scores == [1.0] * len(rows)
    copied = reward(completions=[prompt[3:4] for prompt in shown], prompts=shown)
    assert copied == [0.0] * len(rows), "the answer of the example, to another question"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("tool", "Sum: 42"), ("assistant", "")], 1.0),
        ([("tool", "Sum: 41"), ("assistant", "The answer is Sum: 42.")], 1.0),
        ([("tool", "Sum: 41"), ("assistant", "41")], 0.3),
        ([("assistant", "Sum: 420")], 0.0),
    ],
)
def test_the_plain_reward_of_the_same_file(messages: list[tuple[str, str]], expected: float) -> None:
    reward = load_reward(REPOSITORY / "rewards" / "math_reward.py", "plain_reward")
    completion: list[Any] = [{"role": role, "content": content, "name": "calculate_sum"} for role, content in messages]
    assert reward(completions=[completion], answer=["Sum: 42"], trajectories=[None]) == [expected]


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        ("It is 358.12.", [], 0.0),
        ("It is 358.12.", [("npv_irr", "x", True)], 0.1),
        ("", [("loan_amortization", "Error", False)], 0.25),
        ("", [("loan_amortization", "payment 99", True)], 0.5),
        ("It is 99", [("loan_amortization", "payment 358.12", True)], 0.75),
        ("About 358.1", [("loan_amortization", "payment 358.12", True)], 1.0),
        ("Over 30 years it is 358.12, about 358.1.", [("loan_amortization", "payment 358.12", True)], 1.0),
        ("358.12, or 99", [("loan_amortization", "payment 358.12, total 99", True)], 0.75),  # it has not chosen
        ("About 358.1", [("npv_irr", "x", True), ("loan_amortization", "payment 358.12", True)], 0.95),
    ],
)
def test_financial_tools_reward(text: str, calls: list[tuple[str, str, bool]], expected: float) -> None:
    asked = [{"role": "user", "content": "What is the payment over 30 years?"}]
    columns = {"answer": "358.12", "expected_tools": ["loan_amortization"], "prompts": asked}
    assert score("financial_tools_reward.py", text, episode(*calls), **columns) == pytest.approx(expected)


def test_the_finance_questions_have_the_answers_that_their_tools_give() -> None:
    rows = load_tasks(REPOSITORY / "recipes/data/financial_60.jsonl")
    assert len(rows) == len({row["prompt"][0]["content"] for row in rows}) == 60
    with load_tools(str(REPOSITORY / "tools_funcs/financial_tools_complex.py")) as toolbox:
        assert {row["expected_tools"][0] for row in rows} == set(toolbox.names)
        for row in rows:
            call = json.loads(row["call"])
            result = run_tool(toolbox, call)
            found = re.search(re.escape(row["label"]) + r"\s*(-?\d+(?:\.\d+)?)", result.content)
            assert result.ok and found is not None and found[1] == row["answer"], (row, result.content)
            assert [call["name"]] == row["expected_tools"]


def test_the_word_problems_are_right_in_every_step() -> None:
    rows = load_tasks(f"gsm8k:{REPOSITORY / 'recipes/data/gsm8k_30.jsonl'}")
    for row in rows:
        steps = re.findall(r"<<([\d*/+\-]+)=(\d+)>>", row["solution"])
        assert steps and steps[-1][1] == row["answer"]
        for expression, result in steps:
            assert eval(expression) == int(result), row["solution"]
