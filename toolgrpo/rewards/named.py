"""Rewards that are given to a trainer by name mean what they mean on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolgrpo.rewards import get_reward, load_reward

__all__ = ["named_rewards"]


def named_rewards(rewards: Any) -> Any:
    """Return the same rewards, with built-in names and Python files made into rewards.

    A folder, or a name with a slash, stays: TRL takes it for a reward model, there or on the hub.
    Every other name is a built-in's, or an error that lists them.
    """
    if isinstance(rewards, Sequence) and not isinstance(rewards, str):
        return [named_rewards(reward) for reward in rewards]
    if not isinstance(rewards, str):
        return rewards
    if rewards.endswith(".py"):
        return load_reward(rewards)
    return rewards if "/" in rewards or Path(rewards).is_dir() else get_reward(rewards)
