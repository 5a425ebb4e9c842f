"""Rows to train and to measure on. No bad row is skipped silently."""

from toolgrpo.data.load import load_tasks
from toolgrpo.data.rows import BadRows

__all__ = ["BadRows", "load_tasks"]
