"""Rewards: built in by name, or from a user's file; every one checked.

Knows no torch, TRL or vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolgrpo.calls import Call
from toolgrpo.errors import ConfigError
from toolgrpo.rewards.accuracy import accuracy
from toolgrpo.rewards.base import Reward, RewardFunction
from toolgrpo.rewards.by_task import ByTask
from toolgrpo.rewards.code_exec import code_exec, rows_refused
from toolgrpo.rewards.environment import environment
from toolgrpo.rewards.episode_reading import calls, final_answer, last_tool_response, tool_counts
from toolgrpo.rewards.exact_match import exact_match
from toolgrpo.rewards.gold import (
    GoldEpisode,
    as_answer,
    as_boxed_answer,
    as_program,
    as_result_and_answer,
    check_gold,
    refused_rows,
)
from toolgrpo.rewards.gold_calls import gold_calls
from toolgrpo.rewards.gsm8k import gsm8k
from toolgrpo.rewards.gym import reasoning_gym
from toolgrpo.rewards.math import math
from toolgrpo.rewards.reward_files import load_reward
from toolgrpo.rewards.tool_use import tool_use

__all__ = [
    "BUILT_IN",
    "Call",
    "Reward",
    "calls",
    "check_gold",
    "final_answer",
    "get_reward",
    "last_tool_response",
    "load_reward",
    "refused_rows",
    "tool_counts",
]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in reward, how an episode is written down that earns full marks by its answer, and which
    rows it refuses.
    """

    function: RewardFunction
    gold: GoldEpisode | None = None
    refused: Callable[[Any], dict[int, str]] | None = None


BUILT_IN: dict[str, BuiltIn] = {
    "accuracy": BuiltIn(accuracy, as_result_and_answer),
    "code_exec": BuiltIn(code_exec, as_program, rows_refused),
    "environment": BuiltIn(environment),
    "exact_match": BuiltIn(exact_match, as_answer),
    "gold_calls": BuiltIn(gold_calls),
    "gsm8k": BuiltIn(gsm8k, as_answer),
    "math": BuiltIn(math, as_boxed_answer),
    "reasoning_gym": BuiltIn(reasoning_gym, as_boxed_answer),
    "tool_use": BuiltIn(tool_use),
}
_BY_TASK = "by_task"


def get_reward(name: str) -> Reward:
    """Return a built-in reward by its name."""
    if name == _BY_TASK:
        return Reward(ByTask(_named_or_file), name=name, source="built in")
    if name not in BUILT_IN:
        raise ConfigError(
            f"there is no built-in reward {name!r}; there are {', '.join((*BUILT_IN, _BY_TASK))}. A reward of your own is "
            f"given as a file: --reward_fn FILE.py"
        )
    found = BUILT_IN[name]
    return Reward(found.function, name=name, source="built in", gold=found.gold, refused=found.refused)


def _named_or_file(name: str) -> Reward:
    return load_reward(name) if name.endswith(".py") else get_reward(name)
