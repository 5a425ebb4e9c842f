"""The stages of `recipes/stages`: worked examples, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainings import STAGES
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.rollout.batch import Scored
from toolgrpo.support.plugin_files import import_file
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode
from toolgrpo.tools.base import AfterTurn

TOOLS = ScriptedTools({"look": lambda at: f"r{at}"})
CREDIT, LENGTHS = (import_file(STAGES / f"{name}.py") for name in ("turn_credit", "length_penalty"))
EpisodeTurns, turn_advantages = CREDIT.EpisodeTurns, CREDIT.turn_advantages


def said(*turns: str, tools: ScriptedTools = TOOLS) -> Trajectory:
    return run_episode(ScriptedEngine([ByteChat.say(turn) for turn in turns]), tools)


GOOD = said('call look {"at": 1}', "end")


def test_a_penalty_is_beside_the_largest_of_the_group_and_times_its_mean() -> None:
    sizes = [{"output_tokens": n, "turns": t, "calls": 0} for n, t in ((10, 1), (40, 4), (20, 2))]
    taken = LENGTHS.taken_off([1.0, 1.0, 0.0], sizes, {"output_tokens": 0.3, "turns": 0.1, "calls": 0.5})
    assert taken == pytest.approx([2 / 3 * 0.1, 2 / 3 * 0.4, 2 / 3 * 0.2])  # calls: nobody made one
    assert LENGTHS.taken_off([0.0, 0.0, 0.0], sizes, {"turns": 1.0}) == [0.0] * 3  # nothing succeeds
    assert LENGTHS.taken_off([-1.0, -2.0, 0.0], sizes, {"turns": 1.0}) == [0.0] * 3
    alone = LENGTHS.taken_off([1.0, None, 1.0], sizes, {"turns": 1.0})
    assert alone == pytest.approx([0.5, 0.0, 1.0])  # the largest of those that are scored


def test_gold_call_pays_for_each_gold_call_once() -> None:
    gold = [{"name": "look", "arguments": {"at": 1}}, {"name": "look", "arguments": {"at": 2}}]
    again = said('call look {"at": "1"}', 'call look {"at": 1}', 'call look {"at": 2}', "end")
    found = CREDIT.gold_call([again] * 3, [gold, None, []])
    assert found == [[0.5, 0.0, 0.5, 0.0], [0.0] * 4, [0.0] * 4]


def test_the_environments_reward_by_step_is_read_off_its_turns() -> None:
    steps = iter((0.25, 0.5))
    paid = ScriptedTools({"look": lambda at: "r"}, after_turn=lambda row: AfterTurn(next(steps)))
    run = said('call look {"at": 1}', 'call look {"at": 2}', "end", tools=paid)
    assert CREDIT.environment([run]) == [[0.25, 0.5, 0.0]]
    refused = replace(run, turns=(*run.turns[:1], replace(run.turns[1], reward=None), run.turns[2]))
    assert CREDIT.environment([refused]) == [[0.25, 0.0, 0.0]], "calls beyond a limit reach no environment"
    with pytest.raises(RewardError, match=r"gives no reward by turn; use a class that has `step_reward\(\)`"):
        CREDIT.environment([GOOD])


@pytest.mark.parametrize(
    "given", [[[0.0, 1.0]], [[0.0, 1.0], [0.0]], [[0.0, float("nan")], [0.0, 1.0]], [[0.0, 0.0]] * 3]
)
def test_rewards_by_turn_are_checked_and_never_repaired(given: list[list[float]]) -> None:
    facts = SimpleNamespace(episodes=[Scored({"answer": "3"}, GOOD, total=1.0)] * 2)
    with pytest.raises(RewardError, match="by turn"):
        CREDIT.turn_rewards(facts, lambda trajectories, answer: given)


def test_a_turn_is_compared_with_the_others_that_are_alive_there() -> None:
    group = [
        EpisodeTurns(1.0, (0.0, 0.5)),
        EpisodeTurns(0.0, (0.5, 0.0, 0.0)),
        EpisodeTurns(1.0, (0.0,)),
        EpisodeTurns(None, (9.0, 9.0)),  # is not scored: it has no advantage, and is nobody's baseline
    ]
    found = turn_advantages(group, 4, "none")
    assert found[0] == pytest.approx((1.5 - (0.5 + 1.0) / 2, 1.5 - 0.0))
    assert found[1] == pytest.approx((0.5 - (1.5 + 1.0) / 2, 0.0 - 1.5, 0.0 - (1.0 + 1.0) / 2))  # alone at its third
    assert found[2] == pytest.approx((1.0 - (1.5 + 0.5) / 2,))
    assert found[3] == (0.0, 0.0)


def test_one_standard_deviation_stands_for_the_whole_group_and_each_episode_counts_once_in_it() -> None:
    group = [EpisodeTurns(1.0, (0.0, 0.5)), EpisodeTurns(0.0, (0.0,))]
    plain, scaled = turn_advantages(group, 2, "none"), turn_advantages(group, 2, "group")
    std = sqrt((1.5 - 0.75) ** 2 + (0.0 - 0.75) ** 2)
    assert [of for turns in scaled for of in turns] == pytest.approx(
        [of / (std + 1e-4) for turns in plain for of in turns]
    )
    two = [*group, EpisodeTurns(5.0, (0.0,)), EpisodeTurns(5.0, (0.0,))]
    assert turn_advantages(two, 2, "batch")[2:] == [(0.0,), (0.0,)]
    assert turn_advantages(two, 2, "batch")[0] != pytest.approx(scaled[0])


def test_a_group_alike_in_everything_teaches_nothing_and_one_that_differs_in_a_turn_does() -> None:
    alike = [EpisodeTurns(1.0, (0.1, 0.2))] * 3
    assert turn_advantages(alike, 3, "none") == turn_advantages(alike, 3) == [(0.0, 0.0)] * 3
    other = [*alike[:2], EpisodeTurns(1.0, (0.2, 0.1))]  # as much in all, at another turn
    assert any(map(any, turn_advantages(other, 3, "none")))
    alone = [EpisodeTurns(1.0, (0.5,)), EpisodeTurns(None, (0.1,))]
    assert not any(map(any, turn_advantages(alone, 2, "none")))


totals = st.none() | st.floats(-2, 2, width=16)
rewards_by_turn = st.lists(st.floats(-1, 1, width=16), max_size=4).map(tuple)


@pytest.mark.property
@given(st.lists(st.builds(EpisodeTurns, totals, rewards_by_turn), min_size=4, max_size=4))
def test_an_episodes_own_baseline_is_made_of_others(group: list[Any]) -> None:
    before = turn_advantages(group, 4, "none")
    first = group[0]
    if first.total is None or not first.rewards:
        assert all(value == 0 for value in before[0])
        return
    richer = [replace(first, total=first.total + 64.0), *group[1:]]
    after = turn_advantages(richer, 4, "none")
    alone = sum(one.total is not None for one in group) == 1
    for a, b in zip(before[0], after[0], strict=True):
        assert b - a == pytest.approx(0.0 if alone else 64.0, abs=1e-4)
