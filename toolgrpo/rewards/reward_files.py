"""A reward function from a Python file."""

from __future__ import annotations

from pathlib import Path

from toolgrpo.errors import PluginError
from toolgrpo.plugin_files import import_file
from toolgrpo.rewards.base import Reward
from toolgrpo.rewards.process_state import guarded_exit

_EXAMPLE = "def reward_func(completions, answer, **kwargs): return [0.0] * len(completions)"


def load_reward(path: str | Path, name: str = "reward_func") -> Reward:
    """Load the function `name` of a Python file, and check it.

    The file may import its neighbours.
    """
    file = Path(path)
    with guarded_exit():
        module = import_file(file)
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        there = f"It has {', '.join(functions)}; choose one with --reward_function_name." if functions else ""
        raise PluginError(f"{file} has no {name}. {there or f'Write one, e.g. `{_EXAMPLE}`.'}")
    return Reward(getattr(module, name), name=name, source=str(file))
