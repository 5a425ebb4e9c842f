"""Rewards as a trainer takes them, by name or as functions: as on the command line, where each is shown too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolgrpo.rewards import get_reward, load_reward
from toolgrpo.rewards.base import Reward


def source_text(reward: Any) -> str:
    """Return where the function of a reward stands, `FILE:LINE`; of a reward model its class."""
    reward = inspect.unwrap(reward)
    function = reward.function if isinstance(reward, Reward) else reward
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function) or hasattr(function, "parameters"):
        return type(function).__name__
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(function).__name__
    built_in = isinstance(reward, Reward) and reward.source == "built in"
    return f"built in, {place}" if built_in else place


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
