"""A reward function from a Python file."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from toolgrpo.errors import PluginError
from toolgrpo.rewards.base import Reward
from toolgrpo.rewards.keeping import guarded_exit

__all__ = ["load_reward"]

_EXAMPLE = "def reward_func(completions, answer, **kwargs): return [0.0] * len(completions)"


def load_reward(path: str | Path, name: str = "reward_func") -> Reward:
    """The function `name` of a Python file, checked. The file may import its neighbours."""
    file = Path(path)
    module = _run_file(file)
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        there = f"It has {', '.join(functions)}; choose one with --reward_function_name." if functions else ""
        raise PluginError(f"{file} has no {name}. {there or f'Write one, e.g. `{_EXAMPLE}`.'}")
    return Reward(getattr(module, name), name=name, source=str(file))


def _run_file(file: Path) -> ModuleType:
    if not file.exists():
        raise PluginError(f"the reward file {file} does not exist (the working folder is {Path.cwd()})")
    if not file.is_file():
        raise PluginError(f"the reward file {file} is a folder; give a .py file")
    if file.suffix != ".py":
        raise PluginError(f"the reward file {file} is no .py file; give a Python file that holds `{_EXAMPLE}`")
    # A name of its own, so that two files called reward.py do not replace each other.
    digest = hashlib.sha1(str(file.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"_toolgrpo_reward_{file.stem}_{digest}", file)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with guarded_exit():
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[spec.name]
        if isinstance(error, KeyboardInterrupt):
            raise
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise PluginError(f"the reward file {file}{where} cannot be loaded: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    return module
