"""Turn a graded batch into the input of the loss: one file per idea, and the table of their order (`stages.py`).

The package has pure functions and frozen values over `RolloutBatch`, and imports neither TRL nor the trainer. `Facts`
and `TrainBatch` are public, for your own stages (docs/how-to/stages.md), and imported on first use, because of PyTorch.
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
