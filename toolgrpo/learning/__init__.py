"""From a graded batch to what the loss sees of it: one file an idea, and the table of their order (`stages.py`).

Pure functions and frozen values over `RolloutBatch`; TRL and the trainer are not known here. `Facts` and `TrainBatch`
are public, for stages of yours (docs/how-to/stages.md); they are imported on first use, for they bring PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolgrpo.learning.stages import Facts, TrainBatch

__all__ = ["Facts", "TrainBatch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("toolgrpo.learning.stages"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
