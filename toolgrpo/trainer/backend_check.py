"""Check which backend trains (plain, DDP, FSDP, DeepSpeed),
and that it is the one the launcher was asked for.

accelerate can fall back in silence: with `ACCELERATE_USE_CPU=true` a ZeRO-3 launch exits 0 after
plain DDP, FSDP without an accelerator becomes DDP as well, and DDP can become processes that each
train alone. `check_backend` makes that an error.

Not covered: whether the launcher was asked for the right thing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from toolgrpo.engines.policy import Backend
from toolgrpo.errors import ConfigError


def check_backend(accelerator: Any, environment: Mapping[str, str] = os.environ, *, n_gpus: int = 1) -> Backend:
    """Return the backend that was set up; `ConfigError` if another one was asked for.

    `n_gpus` is how many this process can see.
    """
    backend = Backend.of(accelerator)
    if n_gpus > 1 and backend.kind == "NO" and accelerator.device.type == "cuda":
        raise ConfigError(
            f"this one process sees {n_gpus} GPUs and would spread the model over them. Start one process for each with "
            f"--accelerate_config multi_gpu or `accelerate launch --multi_gpu`, or show it one: CUDA_VISIBLE_DEVICES=0"
        )
    started = int(environment.get("WORLD_SIZE", "1"))
    if started != backend.n_processes:
        raise ConfigError(
            f"the launcher started {started} processes, but accelerate set up {backend}: each would train for itself. "
            f"Choose an --accelerate_config that fits this machine (`toolgrpo --help` names them)."
        )
    for variable, kind, wanted in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP", "FSDP"),
    ):
        if environment.get(variable, "false").lower() == "true" and backend.kind != kind:
            raise ConfigError(
                f"the launcher asked for {wanted} ({variable}=true), but accelerate set up {backend}. On a machine "
                f"without a GPU, `use_cpu: true` and FSDP do that: use --accelerate_config cpu_ddp there, or for "
                f"DeepSpeed on the CPU `use_cpu: false` in the launch file and no use_cpu among the arguments."
            )
    return backend
