"""From rewards to advantages: worked examples, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.errors import RewardError
from toolgrpo.learning.advantages import ESTIMATORS, grouped_advantages

GROUPS = [1.0, 0.0, 0.0, 3.0, 1.0, 1.0, 1.0, None]  # two of four; in the second all are alike


def test_each_estimator_is_its_formula() -> None:
    assert grouped_advantages(GROUPS, 4, "loo") == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3, 0, 0, 0, 0])
    assert grouped_advantages(GROUPS, 4, "max_rl") == pytest.approx([0, -1, -1, 2, 0, 0, 0, 0])
    by = 2.0**0.5 + 1e-4  # the sample standard deviation of 1, 0, 0, 3
    assert grouped_advantages(GROUPS, 4, "grpo") == pytest.approx([0, -1 / by, -1 / by, 2 / by, 0, 0, 0, 0])
    assert grouped_advantages(GROUPS, 4, "grpo", "none") == pytest.approx([0, -1, -1, 2, 0, 0, 0, 0])
    by = 1.0 + 1e-4  # of 1, 0, 0, 3, 1, 1, 1 in one
    assert grouped_advantages(GROUPS, 4, "grpo", "batch") == pytest.approx([0, -1 / by, -1 / by, 2 / by, 0, 0, 0, 0])


def test_one_that_is_alone_in_its_group_teaches_nothing() -> None:
    for estimator in ESTIMATORS:
        assert grouped_advantages([0.5, None, None, None], 2, estimator) == [0.0] * 4


def test_max_rl_over_a_group_that_never_succeeds_is_nothing_and_negative_rewards_are_refused() -> None:
    assert grouped_advantages([0.0, 0.0], 2, "max_rl") == [0.0, 0.0]
    with pytest.raises(RewardError, match=r"max_rl.*0.*-0.5"):
        grouped_advantages([-0.5, 1.0], 2, "max_rl")


def test_groups_are_whole() -> None:
    with pytest.raises(ValueError, match="5 episodes make no whole groups of 4"):
        grouped_advantages([1.0] * 5, 4, "loo")


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
