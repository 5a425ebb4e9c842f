"""The harder embedded tasks: four calls, the same rows everywhere, no row in two splits."""

from __future__ import annotations

import json
from typing import Any

from toolgrpo.data import load_tasks
from toolgrpo.data.chains import N_CALLS, chain_rows
from toolgrpo.rewards import get_reward
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.testing.tools import ScriptedTools

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
