"""The generated questions of the recipes: their answers are what the tools say, and nothing is in two splits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.data.arithmetic import Problem, Step
from toolgrpo.data.rows import success
from toolgrpo.rewards import get_reward
from toolgrpo.tools import load_tools, run_tool

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "data"
KINDS = ("compute", "files", "lookup", "stock")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    copy = tmp_path / "recipes" / "data"
    (copy / "handbook").mkdir(parents=True)
    shutil.copy(DATA / "generate.py", copy)
    (tmp_path / "tools_funcs").symlink_to(ROOT / "tools_funcs")
    subprocess.run([sys.executable, str(copy / "generate.py")], check=True, timeout=300)
    made = sorted(path.relative_to(copy) for path in copy.rglob("*") if path.suffix in (".jsonl", ".md"))
    assert len(made) == 2 + 2 * len(KINDS) + 24 + 1
    assert [path for path in made if (copy / path).read_text() != (DATA / path).read_text()] == []


def question(row: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": row["prompt"]}] if isinstance(row["prompt"], str) else row["prompt"]
    return next(message["content"] for message in reversed(messages) if message["role"] == "user")


def test_each_question_of_finance_stands_after_a_worked_one_of_another_tool() -> None:
    for row in (*rows("financial_generated_train"), *rows("financial_generated_heldout")):
        asked, called, told, _, _ = row["prompt"]
        assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "tool", "assistant", "user"]
        assert called["tool_calls"][0]["function"]["name"] == told["name"] != row["expected_tools"][0]
        assert asked["content"] != question(row)


def test_no_question_is_both_trained_on_and_held_out() -> None:
    for name in ("financial_generated", *(f"handbook_{kind}" for kind in KINDS)):
        train, heldout = ({question(row) for row in rows(f"{name}_{split}")} for split in ("train", "heldout"))
        assert len(train) in (60, 400) and len(heldout) in (12, 240)
        assert not train & heldout


def test_no_worked_arithmetic_problem_is_held_out_and_each_is_solved() -> None:
    worked = [row["messages"] for row in rows("arithmetic_examples")]
    assert len({messages[0]["content"] for messages in worked}) == len(worked) == 96
    for messages in worked:
        calls = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
        steps = tuple(Step(call["name"], call["arguments"]["a"], call["arguments"]["b"]) for call in calls)
        problem = Problem(messages[0]["content"], steps)
        assert problem.split == "train", problem
        assert all(str(step.right) in problem.question for step in steps)
        assert [after.left for after in steps[1:]] == [step.result for step in steps[:-1]]
        assert success(messages[1:], str(problem.answer)), problem


def test_the_tool_that_is_called_right_gives_the_answer() -> None:
    with load_tools(ROOT / "tools_funcs" / "financial_tools_complex.py", workers=1) as box:
        asked = {row["expected_tools"][0]: row for row in rows("financial_generated_heldout")}
        assert sorted(asked) == sorted(box.names), "every tool is asked for"
        for row in asked.values():
            [call] = json.loads(row["gold_calls"])
            completion = [{"role": "tool", "name": call["name"], "content": run_tool(box, call).content}]
            reward = get_reward("tool_result")
            assert reward(completions=[completion], answer=[row["answer"]], trajectories=[None]) == [1.0]


def test_the_mixture_of_the_handbook_has_a_reward_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = load_tasks("recipes/data/handbook_train.yaml")
    assert Counter(found["task"]) == dict.fromkeys(KINDS, 60)
    of_numbers = dict.fromkeys(("lookup", "compute", "stock"), "gsm8k")
    assert {row["task"]: row["reward"] for row in found} == {**of_numbers, "files": "exact_match"}
    assert len(load_tasks("recipes/data/handbook_heldout.yaml")) == 48
