"""The rewards whose spread says if a group is dead: the ones that advantages are made from."""

from __future__ import annotations

from math import nan

import pytest

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.learning.advantages import is_dead, normalized_rewards, weighted_sums
from toolgrpo.learning.shaping import Member, Shaping

LOST = Drop(DropCause.TOOL, "no network")


def member(total: float | None, rewards: tuple[float, ...] = ()) -> Member:
    return Member(total, LOST if total is None else None, rewards)


def test_where_each_reward_is_normalized_first_they_are_the_sums_of_those_in_each_group() -> None:
    """Both groups have alike sums; the second one's rewards differ once each is normalised. One was dropped."""
    shaping = Shaping(normalize_first=True, weights=(1.0, 0.5))
    values = [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.5, 1.0), (9.0, 9.0), (1.0, 0.0)]
    members = [member(None if place == 6 else 1.0, rewards=of) for place, of in enumerate(values)]
    combined = shaping.rewards(members, 4)
    assert is_dead(combined[:4]) and not is_dead(combined[4:]) and combined[6] is None
    kept = [(nan, nan) if place == 6 else of for place, of in enumerate(values)]
    assert combined[4:] == normalized_rewards(kept[4:], (1.0, 0.5))


def test_rewards_that_cancel_out_in_the_sum_may_still_teach_when_each_is_normalized() -> None:
    values = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert is_dead(weighted_sums(values, (1.0, 1.0)))
    assert is_dead(normalized_rewards(values, (1.0, 1.0))), "equal spreads, opposite signs"
    assert not is_dead(normalized_rewards(values, (1.0, 0.5)))


def test_rounding_is_no_spread_after_normalizing() -> None:
    values = [(0.1 + 0.2,), (0.3,), (0.30000001192,), (nan,)]
    assert is_dead(normalized_rewards(values, (1.0,)))
    assert normalized_rewards(values, (1.0,))[3] is None


def test_normalized_rewards_are_those_of_trl() -> None:
    (low, high) = normalized_rewards([(1.0,), (3.0,)], (2.0,))
    assert low == pytest.approx(-2 / (2**0.5 + 1e-4)) and high == pytest.approx(2 / (2**0.5 + 1e-4))


@pytest.mark.parametrize(
    ("rewards", "dead"),
    [
        ([0.0, 0.0, 0.0], True),
        ([1.0, 1.0 - 9e-7], True),
        ([1.0, 1.0 - 2e-6], False),
        ([0.0, 1.0], False),
        ([None, 1.0, nan], True),
        ([None, 1.0, 0.5], False),
        ([], True),
        ([None], True),
    ],
)
def test_a_group_is_dead_if_its_valid_rewards_are_all_alike(rewards: list[float | None], dead: bool) -> None:
    assert is_dead(rewards) is dead
