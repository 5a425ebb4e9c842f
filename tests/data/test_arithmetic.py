"""The embedded tasks and chains: reproducible, disjoint, right, and judged as documented."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest

from toolgrpo.data import load_tasks
from toolgrpo.data.arithmetic import N_CALLS, OPERATIONS, arithmetic_rows, chain_rows
from toolgrpo.data.rows import success
from toolgrpo.errors import DataError
from toolgrpo.rewards import get_reward
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.testing.tools import ScriptedTools


def _solve(question: str) -> float:
    """An independent reading of the question's words."""
    words = question.rstrip(".?")
    if found := re.fullmatch(r"What is (\d+) (plus|minus|times|divided by) (\d+)", words):
        left, word, right = int(found[1]), found[2], int(found[3])
        return {"plus": left + right, "minus": left - right, "times": left * right, "divided by": left / right}[word]
    first, *rest = words.split(", then ")
    numbers = [int(n) for n in re.findall(r"\d+", first)]
    verb = first.split()[0]
    value: float = {
        "Add": numbers[0] + numbers[1],
        "Subtract": numbers[1] - numbers[0],
        "Multiply": numbers[0] * numbers[1],
        "Divide": numbers[0] / numbers[1],
    }[verb]
    for part in rest:
        n = int(re.findall(r"\d+", part)[0])
        value = {"add": value + n, "subtract": value - n, "multiply": value * n, "divide": value / n}[part.split()[0]]
    return value


def test_every_answer_is_that_of_the_words() -> None:
    for row in arithmetic_rows("train", 400) + arithmetic_rows("heldout", 400):
        assert _solve(row["prompt"][0]["content"]) == int(row["answer"])


def test_rows_are_the_same_for_the_same_seed_and_differ_for_another() -> None:
    assert arithmetic_rows("train", 50, 1) == arithmetic_rows("train", 50, 1)
    assert arithmetic_rows("train", 50, 1) != arithmetic_rows("train", 50, 2)
    assert arithmetic_rows("train", 80, 1)[:50] == arithmetic_rows("train", 50, 1)


def test_train_and_heldout_share_no_problem_in_any_wording() -> None:
    def problems(split: Literal["train", "heldout"]) -> set[tuple[str | int, ...]]:
        return {_key(row["prompt"][0]["content"]) for seed in range(3) for row in arithmetic_rows(split, 500, seed)}

    def _key(question: str) -> tuple[str | int, ...]:
        words = {"plus": "add", "minus": "subtract", "times": "multiply", "divided": "divide"}
        found = [words.get(w, w) for w in re.findall(r"[a-z]+", question.lower())]
        operations = [w for w in found if w in OPERATIONS]
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        if question.startswith("Subtract"):
            numbers[0], numbers[1] = numbers[1], numbers[0]
        return (*operations, *numbers)

    assert not problems("train") & problems("heldout")


def test_an_unknown_split_or_a_negative_size_is_refused() -> None:
    with pytest.raises(DataError, match="train and heldout"):
        arithmetic_rows("test", 3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="at least 0"):
        chain_rows("train", -1)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "The answer is 7."}], True),
        ([CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "The answer is 8."}], False),
        ([CALL, {"role": "tool", "content": "8"}, {"role": "assistant", "content": "The answer is 7."}], False),
        ([{"role": "assistant", "content": "The answer is 7."}], False),  # right, but guessed
        ([CALL, {"role": "tool", "content": "7"}], False),  # never said
        ([CALL, {"role": "tool", "content": "7"}, CALL], False),
        ([CALL, {"role": "tool", "content": "7"}, {"role": "assistant", "content": None}], False),
        ([], False),
    ],
)
def test_success_wants_the_tools_and_the_final_word_to_agree(messages: list[dict[str, Any]], expected: bool) -> None:
    assert success(messages, "7") is expected


# Chains


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


def test_rows_are_reproducible_and_the_splits_disjoint() -> None:
    assert chain_rows("train", 60, 1)[:30] == chain_rows("train", 30, 1) != chain_rows("train", 30, 2)
    train, heldout = ({row["gold_calls"] for row in chain_rows(split, 500)} for split in ("train", "heldout"))
    assert len(train) > 490 and not train & heldout


def test_an_episode_that_makes_the_gold_calls_has_full_marks_and_success() -> None:
    (row,) = load_tasks("chains", split="heldout", limit=1)
    turns = [f"call {call['name']} {json.dumps(call['arguments'])}" for call in json.loads(row["gold_calls"])]
    engine = ScriptedEngine([ByteChat.say(turn) for turn in [*turns, row["answer"]]])
    episode = run_episode(engine, ScriptedTools(TOOLS))
    asked: dict[str, Any] = {
        "completions": [list(episode.messages)],
        "trajectories": [episode],
        "prompts": [row["prompt"]],
    }
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    assert get_reward("gold_calls")(**asked, **columns) == [1.0] == get_reward("accuracy")(**asked, **columns)
    assert row["success_measure"] == "arithmetic"
