"""Modules that take long to import and that tools seldom need: what a training script imports.

A function that stands in a training script would have every tool worker import that script, PyTorch
and TRL with it. Where the module holds such a package, its functions are sent by value instead,
with only what they use (`tool_source.py`); a file, or a module that is named, is imported as it is,
and somebody is told how long that took.
"""

from __future__ import annotations

from types import ModuleType

HEAVY = frozenset(
    {"torch", "transformers", "trl", "vllm", "peft", "datasets", "accelerate", "deepspeed", "tensorflow", "jax"}
)
_OURS = ("toolgrpo.trainer", "toolgrpo.commands", "toolgrpo.evaluation")
_SLOW_S = 5.0


def holds_heavy_modules(module: ModuleType) -> bool:
    """Return whether a module's names show that importing it imports such a package."""
    for value in list(vars(module).values()):
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and (home.partition(".")[0] in HEAVY or home.startswith(_OURS)):
            return True
    return False


def slow_import(label: str, seconds: float, heavy: tuple[str, ...]) -> str | None:
    """Return what to say of a plugin that took long to load in the tool workers."""
    if seconds < _SLOW_S:
        return None
    because = f" (it imports {', '.join(sorted(heavy))})" if heavy else ""
    return (
        f"the tool workers took {seconds:.0f} s to import {label}{because}, and so will each that is started again; "
        f"keep tools in a file of their own that imports only what they need"
    )
