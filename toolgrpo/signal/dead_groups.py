"""The one definition of a dead group: its rewards are all alike, so it teaches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

SAME_REWARD = 1e-6  # rewards are added up in fp32 in training


def is_dead(rewards: Iterable[float | None]) -> bool:
    """Return whether the valid combined rewards of one group differ by at most `SAME_REWARD`.

    None and NaN stand for an episode that is not scored. A group of none or one is dead.
    """
    valid = [reward for reward in rewards if reward is not None and not isnan(reward)]
    return not valid or max(valid) - min(valid) <= SAME_REWARD
