"""What a config can know of the machine before accelerate has set it up: the CPU or not, and the precision.

Afterwards the accelerator is asked, for both (`engines/policy.py`), so that the engine runs where
and as the trainer does.
"""

from __future__ import annotations

import os

import torch
from accelerate.utils import parse_flag_from_env

__all__ = ["settled_bf16", "trains_on_cpu"]

_PRECISION = "ACCELERATE_MIXED_PRECISION"  # what a launch file said


def trains_on_cpu(use_cpu: bool) -> bool:
    """Return whether the CPU trains: because it is asked to, by flag or launch file, or for want of a GPU."""
    return use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()


def settled_bf16(bf16: bool | None, fp16: bool | None, *, on_cpu: bool) -> bool | None:
    """Return `bf16` as TRL shall read it; a flag wins over the launch file, in both directions.

    Not given, it is TRL's default (yes) on an accelerator, and the launch file's word on a CPU,
    where bf16 is slower than fp32 on most machines and never exact.
    """
    if bf16 is None and on_cpu:
        bf16 = not fp16 and os.environ.get(_PRECISION) == "bf16"
    if bf16 is False and not fp16 and os.environ.get(_PRECISION, "no") != "no":
        os.environ[_PRECISION] = "no"  # Transformers reads the launch file where no flag is true
    return bf16
