"""The one definition of a dead group."""

from __future__ import annotations

from math import nan

import pytest

from toolgrpo.signal.advantages import is_dead


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
