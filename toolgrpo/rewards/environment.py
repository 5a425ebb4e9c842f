"""The reward that a stateful environment gives for its own episode (its `reward()` or TRL's
`get_reward()`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolgrpo.episode.dropped import EnvironmentLost
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.rewards.base import Score


def environment(trajectories: Sequence[Trajectory], **_: Any) -> list[Score]:
    """Return what each episode's environment gave.

    An environment that gives nothing is an error, not a zero; one that could not be asked, because
    `episode_timeout` had passed, is lost, and its episode dropped.
    """
    rewards: list[Score] = []
    for row, trajectory in enumerate(trajectories):
        if trajectory.reward is None and trajectory.stop_reason is StopReason.DEADLINE:
            rewards.append(EnvironmentLost("episode_timeout passed before its reward was asked for"))
            continue
        if trajectory.reward is None:
            raise RewardError(
                f"the reward `environment` has no value for episode {row}: its environment or agent returned no reward. "
                f"Make `reward()` of its class, or the agent, return a number for every row, or use another --reward."
            )
        rewards.append(trajectory.reward)
    return rewards
