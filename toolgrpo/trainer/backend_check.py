"""Which backend trains (plain, DDP, FSDP, DeepSpeed), and that it is the one the launcher was asked for.

accelerate can fall back in silence: with `ACCELERATE_USE_CPU=true` a ZeRO-3 launch exits 0 after plain DDP, FSDP without
an accelerator becomes DDP as well, and DDP can become processes that each train alone. `check_backend` makes that an error.

Not covered: whether the launcher was asked for the right thing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.utils import DistributedType

from toolgrpo.errors import ConfigError

__all__ = ["Backend", "check_backend"]


@dataclass(frozen=True, slots=True)
class Backend:
    """How the model of one run is spread over its processes."""

    kind: str  # accelerate's DistributedType: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, ...
    n_processes: int
    zero_stage: int | None = None
    fsdp_version: int | None = None

    @classmethod
    def of(cls, accelerator: Any) -> Backend:
        state = accelerator.state
        zero = state.deepspeed_plugin if state.distributed_type == DistributedType.DEEPSPEED else None
        fsdp = state.fsdp_plugin if state.distributed_type == DistributedType.FSDP else None
        return cls(
            kind=DistributedType(state.distributed_type).value,
            n_processes=accelerator.num_processes,
            zero_stage=None if zero is None else int(zero.zero_stage),
            fsdp_version=None if fsdp is None else int(fsdp.fsdp_version),
        )

    @property
    def splits_parameters(self) -> bool:
        """Whether a process holds only a part of the parameters."""
        return self.fsdp_version is not None or self.zero_stage == 3

    def __str__(self) -> str:
        if self.zero_stage is not None:
            return f"DeepSpeed ZeRO-{self.zero_stage} on {self.n_processes} processes"
        if self.fsdp_version is not None:
            return f"FSDP{self.fsdp_version} on {self.n_processes} processes"
        return "one process" if self.n_processes == 1 else f"DDP on {self.n_processes} processes"


def check_backend(accelerator: Any, environment: Mapping[str, str] = os.environ) -> Backend:
    """The backend that was set up; `ConfigError` if the launcher had asked for another one."""
    backend = Backend.of(accelerator)
    started = int(environment.get("WORLD_SIZE", "1"))
    if started != backend.n_processes:
        raise ConfigError(
            f"the launcher started {started} processes, but accelerate set up {backend}: each would train for itself. "
            f"Choose a file of recipes/accelerate/ that fits this machine."
        )
    for variable, kind, wanted in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP", "FSDP"),
    ):
        if environment.get(variable, "false").lower() == "true" and backend.kind != kind:
            raise ConfigError(
                f"the launcher asked for {wanted} ({variable}=true), but accelerate set up {backend}. On a machine "
                f"without a GPU, `use_cpu: true` and FSDP do that: use recipes/accelerate/cpu_ddp.yaml there, or for "
                f"DeepSpeed on the CPU `use_cpu: false` in the launch file and no --use_cpu."
            )
    return backend
