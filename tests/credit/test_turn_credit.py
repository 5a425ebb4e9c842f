"""The credit of turns and of anchor states: worked examples, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.credit.anchor import anchor_steps
from toolgrpo.credit.episodes import EpisodeTurns, episode_turns
from toolgrpo.credit.options import Credit
from toolgrpo.credit.returns import returns_to_go
from toolgrpo.credit.states import states_of
from toolgrpo.credit.turn_metrics import turn_metrics
from toolgrpo.credit.turns import turn_advantages
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.signal.advantages import grouped_advantages
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode
from toolgrpo.trajectory import Trajectory

SCRIPTED = ScriptedTools({"look": lambda at: f"r{at}"})


def said(*turns: str) -> Trajectory:
    return run_episode(ScriptedEngine([ByteChat.say(turn) for turn in turns]), SCRIPTED)


def test_returns_to_go_bring_the_outcome_with_the_last_turn() -> None:
    assert returns_to_go((1.0, 2.0, 4.0), 8.0, 1.0) == (15.0, 14.0, 12.0)
    assert returns_to_go((1.0, 2.0, 4.0), 8.0, 0.5) == (1.0 + 0.5 * (2.0 + 0.5 * 12.0), 2.0 + 0.5 * 12.0, 12.0)
    assert returns_to_go((), 8.0, 0.5) == ()


def test_a_turn_is_compared_with_the_others_that_are_alive_there() -> None:
    group = [
        EpisodeTurns(1.0, (0.0, 0.5)),
        EpisodeTurns(0.0, (0.5, 0.0, 0.0)),
        EpisodeTurns(1.0, (0.0,)),
        EpisodeTurns(None, (9.0, 9.0)),  # is not scored: it has no advantage, and is nobody's baseline
    ]
    found = turn_advantages(group, 4, 1.0, "none")
    assert found[0] == pytest.approx((1.5 - (0.5 + 1.0) / 2, 1.5 - 0.0))
    assert found[1] == pytest.approx((0.5 - (1.5 + 1.0) / 2, 0.0 - 1.5, 0.0 - (1.0 + 1.0) / 2))  # alone at its third
    assert found[2] == pytest.approx((1.0 - (1.5 + 0.5) / 2,))
    assert found[3] == (0.0, 0.0)


def test_one_standard_deviation_stands_for_the_whole_group_and_each_episode_counts_once_in_it() -> None:
    group = [EpisodeTurns(1.0, (0.0, 0.5)), EpisodeTurns(0.0, (0.0,))]
    plain, scaled = turn_advantages(group, 2, 1.0, "none"), turn_advantages(group, 2, 1.0, "group")
    std = sqrt((1.5 - 0.75) ** 2 + (0.0 - 0.75) ** 2)
    for one, other in zip(plain, scaled, strict=True):
        assert other == pytest.approx([value / (std + 1e-4) for value in one])
    two = [*group, EpisodeTurns(5.0, (0.0,)), EpisodeTurns(5.0, (0.0,))]
    assert turn_advantages(two, 2, 1.0, "batch")[2:] == [(0.0,), (0.0,)]
    assert turn_advantages(two, 2, 1.0, "batch")[0] != pytest.approx(scaled[0])


def test_without_rewards_and_with_gamma_1_each_turn_has_todays_advantage() -> None:
    credit = Credit("turns")
    episodes = [EpisodeTurns(total, (0.0,) * n) for total, n in ((1.0, 3), (0.0, 1), (0.5, 2), (0.0, 4))]
    for estimator in ("grpo", "loo"):
        today = grouped_advantages([one.total for one in episodes], 4, estimator)
        for one, of, value in zip(episodes, credit.advantages(episodes, 4, today), today, strict=True):
            assert of == (value,) * one.n_turns
    assert credit.is_of_episode and not credit.has_more_than_outcomes
    assert not replace(credit, gamma=0.9).is_of_episode and not replace(credit, has_rewards=True).is_of_episode


def test_a_group_alike_in_everything_teaches_nothing_and_one_that_differs_in_a_turn_does() -> None:
    credit = Credit("turns", has_rewards=True)
    alike = [EpisodeTurns(1.0, (0.1, 0.2))] * 3
    assert not credit.teaches(alike) and credit.parts(alike, 3) == [(0.0, 0.0)] * 3
    assert credit.teaches([*alike[:2], EpisodeTurns(1.0, (0.2, 0.1))])  # as much in all, at another turn
    assert not credit.teaches([EpisodeTurns(1.0, (0.5,)), EpisodeTurns(None, (0.1,))])
    assert not Credit("anchor").teaches([EpisodeTurns(1.0, (0.0,), ("a",)), EpisodeTurns(1.0, (0.0,), ("a",))])


def test_visits_to_one_state_are_compared_and_a_state_of_ones_own_is_not() -> None:
    group = [
        EpisodeTurns(1.0, (0.0, 0.0), ("start", "x")),
        EpisodeTurns(0.0, (0.0, 0.0), ("start", "x")),
        EpisodeTurns(0.5, (0.0, 0.0), ("start", "y")),
        EpisodeTurns(None, (0.0, 0.0), ("start", "x")),
    ]
    assert anchor_steps(group, 4, 1.0, "none") == [(0.5, 0.5), (-0.5, -0.5), (0.0, 0.0), (0.0, 0.0)]
    credit = Credit("anchor", weight=2.0, scale="none")
    assert credit.advantages(group, 4, [0.1, 0.2, 0.3, 0.0])[:3] == [(1.1, 1.1), (-0.8, -0.8), (0.3, 0.3)]
    twice = [EpisodeTurns(1.0, (0.0, 0.0), ("a", "a")), EpisodeTurns(0.0, (0.0,), ("b",))]
    assert anchor_steps(twice, 2, 0.5, "none") == [(-0.25, 0.25), (0.0,)]  # it came back, and was later nearer


def test_a_state_is_the_prompt_and_what_was_called_and_answered() -> None:
    one, same = said('call look {"at": 1}', "end"), said('call look {"at":1}', "another end")
    other, failed = said('call look {"at": 2}', "end"), said("call look {", "end")
    assert states_of(one) == states_of(same) and len(states_of(one)) == 2
    assert len({states_of(run)[0] for run in (one, other, failed)}) == 1  # one prompt
    assert len({states_of(run)[1] for run in (one, other, failed)}) == 3
    named = [replace(run, turns=(replace(run.turns[0], state="room 3"), run.turns[1])) for run in (one, other)]
    assert states_of(named[0])[1] == states_of(named[1])[1]  # the environment knows better


def test_the_turns_of_a_batch_are_read_off_it() -> None:
    run = said('call look {"at": 1}', "end")
    batch = RolloutBatch(episodes=(Scored({}, run, total=1.0), Scored({}, run, total=0.0, turn_rewards=(0.5, 0.0))))
    first, second = episode_turns(batch, with_states=True)
    assert first == EpisodeTurns(1.0, (0.0, 0.0), states_of(run)) and second.rewards == (0.5, 0.0)


def test_the_log_says_how_far_turns_lie_apart_and_which_groups_came_back() -> None:
    episodes = [
        EpisodeTurns(1.0, (0.5, 0.0)),
        EpisodeTurns(1.0, (0.0,)),
        EpisodeTurns(0.0, ()),
        EpisodeTurns(1.0, (0.0,)),
    ]
    found = turn_metrics(episodes, [(2.0, -2.0), (-1.0,), (), (0.0,)], 2)
    assert found["credit/spread_within_episode"] == 2.0 and found["credit/groups_revived"] == 0.5
    assert found["credit/turn_1/mean"] == pytest.approx(1 / 3) and found["credit/turn_2/size"] == 2.0
    assert found["credit/turn_reward"] == 0.125


groups = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(-2, 2, width=16)), st.lists(st.floats(-1, 1, width=16), max_size=4)),
    min_size=4,
    max_size=4,
)


@pytest.mark.property
@given(groups, st.floats(0.1, 1.0))
def test_an_episodes_own_baseline_is_made_of_others(
    drawn: list[tuple[float | None, list[float]]], gamma: float
) -> None:
    group = [EpisodeTurns(total, tuple(rewards)) for total, rewards in drawn]
    before = turn_advantages(group, 4, gamma, "none")
    first = group[0]
    if first.total is None or not first.rewards:
        assert all(value == 0 for value in before[0])
        return
    richer = [replace(first, total=first.total + 64.0), *group[1:]]
    after = turn_advantages(richer, 4, gamma, "none")
    alone = sum(one.total is not None for one in group) == 1
    for turn, (a, b) in enumerate(zip(before[0], after[0], strict=True)):
        gained = 0.0 if alone else 64.0 * gamma ** (len(first.rewards) - 1 - turn)
        assert b - a == pytest.approx(gained, abs=1e-4)
