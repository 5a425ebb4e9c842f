from __future__ import annotations

import pytest

from toolgrpo.errors import RewardError
from toolgrpo.ledger import Ledger
from toolgrpo.rewards import get_reward
from toolgrpo.trajectory import StopReason, Trajectory


def trajectory(reward: float | None) -> Trajectory:
    return Ledger([1]).finish(StopReason.FINISHED, reward=reward)


def test_the_environments_word_is_the_reward() -> None:
    reward = get_reward("environment")
    given = [trajectory(0.25), trajectory(1.0)]
    assert reward(prompts=["q", "q"], completions=[[], []], completion_ids=[[], []], trajectories=given) == [0.25, 1.0]


def test_nothing_given_is_an_error_and_no_zero() -> None:
    with pytest.raises(RewardError, match="nothing to give for episode 1"):
        get_reward("environment")(
            prompts=["q", "q"],
            completions=[[], []],
            completion_ids=[[], []],
            trajectories=[trajectory(0.25), trajectory(None)],
        )
