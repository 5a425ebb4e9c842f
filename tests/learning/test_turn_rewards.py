"""Rewards by turn: what the built-in ones say, and what a user's function may return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.drops import Drop, DropCause
from toolgrpo.errors import PluginError, RewardError
from toolgrpo.learning.turn_rewards import TurnReward, TurnRewards, get_turn_reward, load_turn_reward
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode
from toolgrpo.tools.base import AfterTurn
from toolgrpo.trajectory import Trajectory

TOOLS = ScriptedTools({"look": lambda at: f"r{at}"})


def said(*turns: str, tools: ScriptedTools = TOOLS) -> Trajectory:
    return run_episode(ScriptedEngine([ByteChat.say(turn) for turn in turns]), tools)


GOOD = said('call look {"at": 1}', "end")
BAD = said('call nothing {"at": 1}', "call look {", 'call look {"at": 2}', "end")


def test_gold_call_pays_for_each_gold_call_once() -> None:
    gold = [{"name": "look", "arguments": {"at": 1}}, {"name": "look", "arguments": {"at": 2}}]
    again = said('call look {"at": "1"}', 'call look {"at": 1}', 'call look {"at": 2}', "end")
    reward = get_turn_reward("gold_call")
    rows: list[dict[str, Any]] = [{"gold_calls": gold}, {"gold_calls": None}, {"gold_calls": []}]
    assert reward(rows, [again, again, again]) == [(0.5, 0.0, 0.5, 0.0), (0.0,) * 4, (0.0,) * 4]
    with pytest.raises(
        RewardError, match=r"asks for 'gold_calls', which the data does not have. There is: answer, trajectories"
    ):
        reward([{"answer": "1"}], [again])


def test_the_environments_reward_by_step_is_read_off_its_turns() -> None:
    steps = iter((0.25, 0.5))
    paid = ScriptedTools({"look": lambda at: "r"}, after_turn=lambda row: AfterTurn(next(steps)))
    run = said('call look {"at": 1}', 'call look {"at": 2}', "end", tools=paid)
    assert get_turn_reward("environment")([{}], [run]) == [(0.25, 0.5, 0.0)]
    with pytest.raises(RewardError, match=r"nothing for turn 1 of episode 0: its environment gives no reward by step"):
        get_turn_reward("environment")([{}], [GOOD])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [[0.0, 1.0]]", r"returned 1 lists for 2 trajectories"),
        (
            "return [[0.0] * len(t.turns) for t in trajectories][:1] + [[0.0]]",
            r"1 numbers for episode 1, which has 4 turns",
        ),
        (
            "return [[0.0] * len(t.turns) for t in trajectories[:1]] + [0.0]",
            r"a float for episode 1, which has 4 turns",
        ),
        ("return [[float('nan')] * len(t.turns) for t in trajectories]", r"float nan for turn 1 of episode 0"),
        ("return [[None] * len(t.turns) for t in trajectories]", r"NoneType None for turn 1 of episode 0.*give 0"),
        ("return 0.5", r"returned a float; it must return a list with one list"),
        ("return 1 / 0", r"raised ZeroDivisionError: division by zero.*line 2"),
    ],
)
def test_what_a_users_function_returns_is_checked_and_never_repaired(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(f"def turn_reward_func(trajectories, **kwargs):\n    {body}\n")
    with pytest.raises(RewardError, match=rf"turn reward mine.turn_reward_func \(.*mine.py\).*{words}"):
        load_turn_reward(tmp_path / "mine.py")([{}, {}], [GOOD, BAD])


def test_a_users_function_gets_the_columns_that_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def turn_reward_func(trajectories, answer, other=2.0):\n"
        "    return [[float(a)] * len(t.turns) for t, a in zip(trajectories, answer)]\n"
    )
    reward = load_turn_reward(tmp_path / "mine.py")
    assert reward([{"answer": "3", "prompt": "p"}], [GOOD]) == [(3.0, 3.0)]
    with pytest.raises(RewardError, match="asks for 'answer'"):
        reward.check_columns(["prompt"])


def test_what_is_no_turn_reward_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "turn_reward_func = 3\ndef other(trajectories): return []\ndef wrong(x): return x\n"
    )
    with pytest.raises(PluginError, match="must be a function, as in `def turn_reward_func"):
        load_turn_reward(tmp_path / "mine.py")
    with pytest.raises(PluginError, match=r"has no missing\. Write one"):
        load_turn_reward(f"{tmp_path / 'mine.py'}:missing")
    with pytest.raises(PluginError, match="must take `trajectories` by name"):
        load_turn_reward(f"{tmp_path / 'mine.py'}:wrong")
    assert load_turn_reward(f"{tmp_path / 'mine.py'}:other").name == "mine.other"


def test_several_are_weighed_and_an_episode_without_a_score_is_not_asked_about() -> None:
    asked: list[int] = []

    def ones(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
        asked.append(len(trajectories))
        return [[1.0] * len(one.turns) for one in trajectories]

    def places(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
        return [[float(place) for place, _ in enumerate(one.turns)] for one in trajectories]

    rewards = TurnRewards((TurnReward(places, "places", "here"), TurnReward(ones, "ones", "here")), (2.0, 0.5))
    lost = replace(BAD, dropped=Drop(DropCause.TOOL, "gone"))
    assert rewards([{}, {}, {}], [GOOD, BAD, lost]) == [(0.5, 2.5), (0.5, 2.5, 4.5, 6.5), (0.0,) * 4]
    assert asked == [2]
