"""From rewards to advantages: worked examples, and what holds for all of them.

And which rewards those are, whose spread says if a group is dead.
"""

from __future__ import annotations

from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.errors import RewardError
from toolgrpo.learning.advantages import (
    ESTIMATORS,
    Member,
    Shaping,
    grouped_advantages,
    is_dead,
    normalized_rewards,
    weighted_sums,
)

GROUPS = [1.0, 0.0, 0.0, 3.0, 1.0, 1.0, 1.0, None]  # two of four; in the second all are alike


def test_each_estimator_is_its_formula() -> None:
    assert grouped_advantages(GROUPS, 4, "loo") == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3, 0, 0, 0, 0])
    assert grouped_advantages(GROUPS, 4, "max_rl") == pytest.approx([0, -1, -1, 2, 0, 0, 0, 0])
    by = 2.0**0.5 + 1e-4  # the sample standard deviation of 1, 0, 0, 3
    assert grouped_advantages(GROUPS, 4, "grpo") == pytest.approx([0, -1 / by, -1 / by, 2 / by, 0, 0, 0, 0])
    assert grouped_advantages(GROUPS, 4, "grpo", "none") == pytest.approx([0, -1, -1, 2, 0, 0, 0, 0])
    by = 1.0 + 1e-4  # of 1, 0, 0, 3, 1, 1, 1 in one
    assert grouped_advantages(GROUPS, 4, "grpo", "batch") == pytest.approx([0, -1 / by, -1 / by, 2 / by, 0, 0, 0, 0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_that_is_alone_in_its_group_teaches_nothing_and_groups_are_whole(estimator: str) -> None:
    assert grouped_advantages([0.5, None, None, None], 2, estimator) == [0.0] * 4
    with pytest.raises(ValueError, match="5 episodes make no whole groups of 4"):
        grouped_advantages([1.0] * 5, 4, estimator)


def test_max_rl_over_a_group_that_never_succeeds_is_nothing_and_negative_rewards_are_refused() -> None:
    assert grouped_advantages([0.0, 0.0], 2, "max_rl") == [0.0, 0.0]
    with pytest.raises(RewardError, match=r"max_rl.*0.*-0.5"):
        grouped_advantages([-0.5, 1.0], 2, "max_rl")


@pytest.mark.property
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@given(st.lists(st.one_of(st.none(), st.floats(0, 100, width=32)), min_size=6, max_size=6))
def test_advantages_of_a_group_add_up_to_nothing_and_keep_the_order(estimator: str, group: list[float | None]) -> None:
    advantages = grouped_advantages(group, 6, estimator)
    size = max(1.0, *map(abs, advantages))
    assert abs(sum(advantages)) < 1e-6 * size
    pairs = [(r, a) for r, a in zip(group, advantages, strict=True) if r is not None]
    assert [a for _, a in sorted(pairs)] == pytest.approx(sorted(a for _, a in pairs), abs=1e-9)
    assert all(a == 0 for r, a in zip(group, advantages, strict=True) if r is None)


# The rewards that advantages are made from.


def test_where_each_reward_is_normalized_first_they_are_the_sums_of_those_in_each_group() -> None:
    """Both groups have alike sums; the second one's rewards differ once each is normalised. One was dropped."""
    values = [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.5, 1.0), (nan, nan), (1.0, 0.0)]
    members = [Member(1.0, None, of) for of in values]
    members[6] = Member(None, Drop(DropCause.TOOL, "no network"), (9.0, 9.0))
    combined = Shaping(normalize_first=True, weights=(1.0, 0.5)).rewards(members, 4)
    assert is_dead(combined[:4]) and not is_dead(combined[4:]) and combined[6] is None
    assert combined[4:] == normalized_rewards(values[4:], (1.0, 0.5))


def test_rewards_that_cancel_out_in_the_sum_may_still_teach_when_each_is_normalized() -> None:
    values = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert is_dead(weighted_sums(values, (1.0, 1.0)))
    assert is_dead(normalized_rewards(values, (1.0, 1.0))), "equal spreads, opposite signs"
    assert not is_dead(normalized_rewards(values, (1.0, 0.5)))


def test_rounding_is_no_spread_after_normalizing_and_two_rewards_are_normalized_as_trl_does() -> None:
    values = [(0.1 + 0.2,), (0.3,), (0.30000001192,), (nan,)]
    assert is_dead(normalized_rewards(values, (1.0,)))
    assert normalized_rewards(values, (1.0,))[3] is None
    far = 2 / (2**0.5 + 1e-4)
    assert normalized_rewards([(1.0,), (3.0,)], (2.0,)) == pytest.approx([-far, far])


def test_a_group_is_dead_if_its_valid_rewards_are_all_alike() -> None:
    dead: list[list[float | None]] = [[1.0, 1.0 - 9e-7], [None, 1.0, nan], [None], []]
    live: list[list[float | None]] = [[1.0, 1.0 - 2e-6], [None, 1.0, 0.5]]
    assert [is_dead(group) for group in (*dead, *live)] == [True] * 4 + [False] * 2
