"""The reward that a stateful environment gives for its own episode (its `reward()` or TRL's
`get_reward()`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolgrpo.errors import RewardError
from toolgrpo.trajectory import Trajectory

__all__ = ["environment"]


def environment(trajectories: Sequence[Trajectory], **_: Any) -> list[float]:
    """Return what each episode's environment gave.

    An environment that gives nothing is an error, not a zero.
    """
    rewards: list[float] = []
    for row, trajectory in enumerate(trajectories):
        if trajectory.reward is None:
            raise RewardError(
                f"the reward `environment` has nothing to give for episode {row}: its environment returned no reward. "
                f"Use --environment with a class that has `reward()`, or another --reward."
            )
        rewards.append(trajectory.reward)
    return rewards
