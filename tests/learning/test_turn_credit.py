"""Turn-level credit: worked examples, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.learning.turns import EpisodeTurns, episode_turns, teaches, turn_advantages
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools, run_episode

SCRIPTED = ScriptedTools({"look": lambda at: f"r{at}"})


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
    for one, other in zip(plain, scaled, strict=True):
        assert other == pytest.approx([value / (std + 1e-4) for value in one])
    two = [*group, EpisodeTurns(5.0, (0.0,)), EpisodeTurns(5.0, (0.0,))]
    assert turn_advantages(two, 2, "batch")[2:] == [(0.0,), (0.0,)]
    assert turn_advantages(two, 2, "batch")[0] != pytest.approx(scaled[0])


def test_a_group_alike_in_everything_teaches_nothing_and_one_that_differs_in_a_turn_does() -> None:
    alike = [EpisodeTurns(1.0, (0.1, 0.2))] * 3
    assert not teaches(alike) and turn_advantages(alike, 3) == [(0.0, 0.0)] * 3
    assert teaches([*alike[:2], EpisodeTurns(1.0, (0.2, 0.1))])  # as much in all, at another turn
    assert not teaches([EpisodeTurns(1.0, (0.5,)), EpisodeTurns(None, (0.1,))])


def test_the_turns_of_a_batch_are_read_off_it() -> None:
    run = run_episode(ScriptedEngine([ByteChat.say(turn) for turn in ('call look {"at": 1}', "end")]), SCRIPTED)
    batch = RolloutBatch(episodes=(Scored({}, run, total=1.0), Scored({}, run, total=0.0, turn_rewards=(0.5, 0.0))))
    assert episode_turns(batch.episodes) == [EpisodeTurns(1.0, (0.0, 0.0)), EpisodeTurns(0.0, (0.5, 0.0))]


groups = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(-2, 2, width=16)), st.lists(st.floats(-1, 1, width=16), max_size=4)),
    min_size=4,
    max_size=4,
)


@pytest.mark.property
@given(groups)
def test_an_episodes_own_baseline_is_made_of_others(drawn: list[tuple[float | None, list[float]]]) -> None:
    group = [EpisodeTurns(total, tuple(rewards)) for total, rewards in drawn]
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
