"""Rewards: built-in ones by name, and functions from a user's file, each checked.

The package imports no torch, TRL or vLLM.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from toolgrpo.episode.tool_calls import Call
from toolgrpo.episode.trajectory import Message, calls, final_answer, last_tool_response, tool_counts
from toolgrpo.errors import ConfigError, PluginError
from toolgrpo.rewards.accuracy import accuracy
from toolgrpo.rewards.base import Reward, RewardFunction
from toolgrpo.rewards.by_task import ByTask
from toolgrpo.rewards.code_exec import code_exec, rows_refused
from toolgrpo.rewards.environment import environment
from toolgrpo.rewards.exact_match import exact_match, gives_answer
from toolgrpo.rewards.gold import (
    as_answer,
    as_boxed_answer,
    as_program,
    as_result_and_answer,
    check_gold,
    refused_by_task,
    refused_rows,
)
from toolgrpo.rewards.gold_calls import gold_calls
from toolgrpo.rewards.gold_calls import rows_refused as calls_refused
from toolgrpo.rewards.gym import reasoning_gym
from toolgrpo.rewards.math import accuracy_reward, gsm8k, math, reasoning_accuracy_reward, rows_without_number
from toolgrpo.rewards.tool_use import tool_use
from toolgrpo.support.plain_text import counted
from toolgrpo.support.plugin_files import import_failed, import_file
from toolgrpo.support.shipped_files import nearest_is

__all__ = [
    "BUILT_IN",
    "Call",
    "Reward",
    "calls",
    "check_gold",
    "final_answer",
    "get_reward",
    "gives_answer",
    "last_tool_response",
    "load_reward",
    "refused_rows",
    "tool_counts",
]


def _built_in(function: RewardFunction, **marks: Any) -> Reward:
    return Reward(function, function.__name__, "built in", **marks)


BUILT_IN = {
    "accuracy": _built_in(accuracy, gold=as_result_and_answer),
    "code_exec": _built_in(code_exec, gold=as_program, refused=rows_refused),
    "environment": _built_in(environment),
    "exact_match": _built_in(exact_match, gold=as_answer),
    "gold_calls": _built_in(gold_calls, refused=calls_refused),
    "gsm8k": _built_in(gsm8k, gold=as_answer, refused=rows_without_number),
    "math": _built_in(math, gold=as_boxed_answer),
    "reasoning_gym": _built_in(reasoning_gym, gold=as_boxed_answer),
    "tool_result": Reward(accuracy, "tool_result", "built in", gold=as_result_and_answer),
    "tool_use": _built_in(tool_use),
}
_COMPARING = {"accuracy_reward": accuracy_reward, "reasoning_accuracy_reward": reasoning_accuracy_reward}
IMPORTED = ("think_format_reward", "get_soft_overlong_punishment")  # of TRL's, as its script names them
_EXAMPLE = "def reward_func(completions, answer, **kwargs): return [0.0] * len(completions)"


def get_reward(name: str) -> Reward:
    """Return a built-in reward by its name, one of TRL's, or the function of a dotted path."""
    if name == "by_task":
        by_task = ByTask(lambda name: load_reward(name) if _is_file(name) else get_reward(name))
        return Reward(by_task, name, "built in", refused=partial(refused_by_task, by_task))
    if name == "judge":
        from toolgrpo.rewards.judge import judge  # only who names it needs its settings

        return Reward(judge(), name, "built in")
    if name in (*_COMPARING, *IMPORTED):
        return _of_trl(name)
    if re.fullmatch(r"\w+(\.\w+)+", name):
        return _import_reward(name)
    if name not in BUILT_IN:
        known = (*BUILT_IN, "by_task", "judge", *_COMPARING, *IMPORTED)
        raise ConfigError(
            f"there is no built-in reward {name!r}{nearest_is(name, known)}; there are {', '.join(known)}. Give your "
            f"own reward as a file: --reward_fn FILE.py"
        )
    return BUILT_IN[name]


def _of_trl(name: str) -> Reward:
    """Return a reward of TRL's, which reads one message: the final response of an episode."""
    if name in _COMPARING and find_spec("math_verify") is None:
        raise ConfigError(f"TRL's reward {name} needs math_verify: pip install 'toolgrpo[math]'")
    of_trl: RewardFunction = _COMPARING.get(name) or getattr(import_module("trl.rewards"), name)
    if name.startswith("get_"):
        return Reward(of_trl(max_completion_len=1280, soft_punish_cache=256), name, "TRL")  # its script's numbers

    @wraps(of_trl)
    def of_final_response(completions: Sequence[Any], **kwargs: Any) -> Any:
        return of_trl([[_one_text(messages)] for messages in completions], **kwargs)

    return Reward(of_final_response, name, "TRL")


def _one_text(messages: Sequence[Message]) -> Message:
    """Return the last message as TRL's rewards read it, its thinking in the text."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    thought, text = last.get("reasoning_content"), str(last.get("content") or "")
    return {"role": "assistant", "content": text if thought is None else f"<think>{thought}</think>{text}"}


def named_rewards(rewards: Any, function: str = "reward_func") -> Any:
    """Return the same rewards, with built-in names and Python files made into rewards: the one door for a trainer's
    argument and for flags. Of several files each reward has the name of its file too, under which it is logged.

    A folder, or a name with a slash, stays: TRL takes it for a reward model, there or on the hub.
    Every other name is a built-in's, or an error that lists them; `function` is what a file exports.
    """
    if isinstance(rewards, Sequence) and not isinstance(rewards, str):
        found = [named_rewards(reward, function) for reward in rewards]
        files = [Path(reward) if _is_file(reward) else None for reward in rewards]
        if len(files) - files.count(None) < 2:
            return found
        return [
            reward if file is None else replace(reward, name=f"{file.stem}.{reward.name}")
            for reward, file in zip(found, files, strict=True)
        ]
    if _is_file(rewards):
        return load_reward(rewards, function)
    is_model = not isinstance(rewards, str) or "/" in rewards or Path(rewards).is_dir()
    return rewards if is_model else get_reward(rewards)


def _is_file(reward: Any) -> bool:
    return isinstance(reward, Path) or (isinstance(reward, str) and reward.endswith(".py"))


def load_reward(path: str | Path, name: str = "reward_func") -> Reward:
    """Load the function `name` of a Python file, which may import its neighbours, and check it."""
    file = Path(path)
    module = import_file(file)
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        there = f"It has {', '.join(functions)}; choose one with --reward_function_name." if functions else ""
        raise PluginError(f"{file} has no {name}. {there or f'Write one, e.g. `{_EXAMPLE}`.'}")
    return Reward(getattr(module, name), name=name, source=str(file))


def _import_reward(path: str) -> Reward:
    """Import the function of a dotted path, `package.module.function`, also from the working folder."""
    module, _, name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = import_module(module)
    except Exception as error:  # a module may raise anything
        raise PluginError(import_failed(path, error)) from error
    if not callable(getattr(found, name, None)):
        raise PluginError(f"{module} has no function {name}")
    return Reward(getattr(found, name), name=name, source=module)


def check_weights(weights: Sequence[float] | None, names: Sequence[str]) -> None:
    """Raise ConfigError unless each reward has a name of its own, and a weight if there are any."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two rewards have the name {twice!r}, under which both would be logged; give each once (with "
            f"its weight in --reward_weights), or rename a file"
        )
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"reward_weights has {counted(len(weights), 'number')} for {counted(len(names), 'reward')} "
            f"({', '.join(names)}); give one weight for each reward, in this order"
        )
    if weights is not None and not all(map(isfinite, weights)):
        raise ConfigError(
            f"reward_weights must be finite numbers, got {', '.join(f'{weight:g}' for weight in weights)}"
        )
