"""Rows to train and to measure on. No bad row is skipped silently.

The public names are imported on first use, so code that only checks a row needs no `datasets`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolgrpo.data.load import load_tasks
    from toolgrpo.data.rows import BadRows

__all__ = ["BadRows", "load_tasks"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("toolgrpo.data.load" if name == "load_tasks" else "toolgrpo.data.rows"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
