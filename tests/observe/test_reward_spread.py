"""The spread of a batch's rewards."""

from __future__ import annotations

from toolgrpo.observe.group_spread import reward_spread


def test_smallest_largest_and_groups_that_teach_nothing() -> None:
    metrics = reward_spread([1.0, 1.0, 0.0, 0.5, -2.0, -2.0], group_size=2)
    assert metrics == {"reward/min": -2.0, "reward/max": 1.0, "reward/groups_without_spread": 2 / 3}


def test_rounding_is_no_spread() -> None:
    almost = [1.2, 1.2 + 1e-7, 1.2 - 1e-7, 1.2]
    assert reward_spread(almost, group_size=4)["reward/groups_without_spread"] == 1.0
    assert reward_spread([1.2, 1.21, 1.2, 1.2], group_size=4)["reward/groups_without_spread"] == 0.0
