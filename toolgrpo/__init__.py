"""Teach a language model to use tools by reinforcement learning: a TRL `GRPOTrainer` extension.

The public names are imported on first use, so that `import toolgrpo.tools` in a tool worker stays
light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.episode.trajectory import Trajectory

if TYPE_CHECKING:
    from toolgrpo.trainer.config import ToolGRPOConfig
    from toolgrpo.trainer.rollout_func import rollout_func
    from toolgrpo.trainer.trainer import ToolGRPOTrainer

__version__ = "0.1.0"
__all__ = ["DropEpisode", "ToolGRPOConfig", "ToolGRPOTrainer", "Trajectory", "rollout_func"]

_LAZY = {
    "ToolGRPOConfig": "toolgrpo.trainer.config",
    "ToolGRPOTrainer": "toolgrpo.trainer.trainer",
    "rollout_func": "toolgrpo.trainer.rollout_func",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import_module("toolgrpo.support.process_setup").prepare()  # before PyTorch is imported
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
