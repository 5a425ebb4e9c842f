"""Rewards: built in by name, or from a user's file; every one checked. Knows no torch, TRL or vLLM."""

from __future__ import annotations

from toolgrpo.errors import ConfigError
from toolgrpo.rewards.accuracy import accuracy
from toolgrpo.rewards.base import Reward, RewardFunction
from toolgrpo.rewards.loading import load_reward

__all__ = ["BUILT_IN", "Reward", "get_reward", "load_reward"]

BUILT_IN: dict[str, RewardFunction] = {
    "accuracy": accuracy,
}


def get_reward(name: str) -> Reward:
    """A built-in reward by its name."""
    if name not in BUILT_IN:
        raise ConfigError(
            f"there is no built-in reward {name!r}; there are {', '.join(BUILT_IN)}. A reward of your own is given as a "
            f"file: --reward_fn FILE.py"
        )
    return Reward(BUILT_IN[name], name=name, source="built in")
