"""The embedded tasks and chains: reproducible, disjoint, right, and judged as documented."""

from __future__ import annotations

import json
import operator
import re
from functools import reduce
from typing import Any

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.data.arithmetic import N_CALLS, SPLITS, arithmetic_rows, chain_rows
from toolgrpo.data.rows import success
from toolgrpo.errors import DataError
from toolgrpo.rewards import get_reward
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.testing.tools import ScriptedTools

VALUES = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv}
WORDS = {"plus": "add", "minus": "subtract", "times": "multiply", "divided": "divide"}


def read(question: str) -> tuple[int, list[tuple[str, int]]]:
    """An independent reading of the question's words: the number that it begins with, and what is done to it."""
    if found := re.fullmatch(r"What is (\d+) (plus|minus|times|divided) (?:by )?(\d+)\?", question):
        return int(found[1]), [(WORDS[found[2]], int(found[3]))]
    first, *rest = question.rstrip(".").split(", then ")
    verb, (left, right) = first.split()[0].lower(), map(int, re.findall(r"\d+", first))
    if verb == "subtract":  # subtract 3 from 7
        left, right = right, left
    return left, [(verb, right), *((part.split()[0], int(re.findall(r"\d+", part)[0])) for part in rest)]


def test_every_answer_is_that_of_the_words_and_the_splits_share_no_problem_in_any_wording() -> None:
    problems: dict[str, set[str]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for row in (row for seed in range(3) for row in arithmetic_rows(split, 500, seed)):
            first, steps = read(row["prompt"][0]["content"])
            problems[split].add(f"{first} {steps}")
            value = reduce(lambda value, step: VALUES[step[0]](value, step[1]), steps, first)
            assert value == int(row["answer"])
    assert problems["train"] and not problems["train"] & problems["heldout"]


@pytest.mark.parametrize("draw", [arithmetic_rows, chain_rows])
def test_rows_are_the_same_for_the_same_seed_and_differ_for_another(draw: Any) -> None:
    assert draw("train", 80, 1)[:50] == draw("train", 50, 1) != draw("train", 50, 2)


def test_an_unknown_split_or_a_negative_size_is_refused() -> None:
    with pytest.raises(DataError, match="train and heldout"):
        arithmetic_rows("test", 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at least 0"):
        chain_rows("train", -1)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
SEVEN = {"role": "tool", "content": "7"}


def said(content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([CALL, SEVEN, said("The answer is 7.")], True),
        ([CALL, SEVEN, said("The answer is 8.")], False),
        ([CALL, {"role": "tool", "content": "8"}, said("The answer is 7.")], False),
        ([said("The answer is 7.")], False),  # right, but guessed
        ([CALL, SEVEN], False),  # never said
        ([CALL, SEVEN, CALL], False),
        ([CALL, SEVEN, said(None)], False),
        ([], False),
    ],
)
def test_success_wants_the_tools_and_the_final_word_to_agree(messages: list[dict[str, Any]], expected: bool) -> None:
    assert success(messages, "7") is expected


TOOLS = {
    "add": lambda a, b: str(a + b),
    "subtract": lambda a, b: str(a - b),
    "multiply": lambda a, b: str(a * b),
    "divide": lambda a, b: str(a // b),
}


def test_the_gold_calls_lead_to_the_answer_one_after_the_other() -> None:
    for row in chain_rows("train", 100):
        calls = json.loads(row["gold_calls"])
        results = [TOOLS[call["name"]](**call["arguments"]) for call in calls]
        assert len(calls) == N_CALLS == row["n_calls"] and results[-1] == row["answer"]
        assert [str(call["arguments"]["a"]) for call in calls[1:]] == results[:-1]
        assert 0 <= int(row["answer"]) <= 9999 and row["prompt"][0]["content"].count(", then ") == N_CALLS - 1


def test_the_splits_of_chains_are_disjoint() -> None:
    train, heldout = ({row["gold_calls"] for row in chain_rows(split, 500)} for split in ("train", "heldout"))
    assert len(train) > 490 and not train & heldout


def test_an_episode_that_makes_the_gold_calls_has_full_marks_and_success() -> None:
    (row,) = load_tasks("chains", split="heldout", limit=1)
    turns = [f"call {call['name']} {json.dumps(call['arguments'])}" for call in json.loads(row["gold_calls"])]
    engine = ScriptedEngine([ByteChat.say(turn) for turn in [*turns, row["answer"]]])
    episode = run_episode(engine, ScriptedTools(TOOLS))
    completions = [list(episode.messages)]
    asked: dict[str, Any] = {"completions": completions, "trajectories": [episode], "prompts": [row["prompt"]]}
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    assert get_reward("gold_calls")(**asked, **columns) == [1.0] == get_reward("accuracy")(**asked, **columns)
    assert row["success_measure"] == "arithmetic"
