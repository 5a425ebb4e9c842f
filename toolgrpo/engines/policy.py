"""`Policy`: the model that is sampled from, as engines need to know it;
and the backend that spreads it over processes.

Who has a model (a trainer, an evaluation) describes it by this value; no engine knows where it came
from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType


@dataclass(frozen=True, slots=True)
class Backend:
    """Distribution of a run's model over its processes."""

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
        """Return whether a process holds only a part of the parameters."""
        return self.fsdp_version is not None or self.zero_stage == 3

    def __str__(self) -> str:
        if self.zero_stage is not None:
            return f"DeepSpeed ZeRO-{self.zero_stage} on {self.n_processes} processes"
        if self.fsdp_version is not None:
            return f"FSDP{self.fsdp_version} on {self.n_processes} processes"
        return "one process" if self.n_processes == 1 else f"DDP on {self.n_processes} processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One model in one process.

    `get_model` gives the model without wrappers, with its adapter if it has one; it is asked anew
    each time, because a trainer may wrap the model later. `weights` walks all parameters and
    persistent buffers under their checkpoint names, gathered and merged; each process must walk
    them to the end.
    """

    get_model: Callable[[], Any]
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    dtype: torch.dtype  # of a forward pass; an engine computes in the same
    device: torch.device
    backend: Backend
    process_index: int = 0
    wait_for_everyone: Callable[[], None] = lambda: None

    @property
    def model(self) -> Any:
        return self.get_model()

    @property
    def base_model(self) -> Any:
        """The transformers model, without an adapter around it."""
        model = self.get_model()
        return model.get_base_model() if hasattr(model, "peft_config") else model

    @property
    def is_quantized(self) -> bool:
        """Return whether weights are kept packed, in 4 or 8 bits, and computed with unpacked."""
        return bool(getattr(self.base_model, "is_quantized", False))

    @property
    def is_in_4_bits(self) -> bool:
        """Return whether they are packed in 4 bits, by bitsandbytes."""
        return bool(getattr(self.base_model, "is_loaded_in_4bit", False))

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0


def compute_dtype(model: Any, mixed_precision: str) -> torch.dtype:
    """Return the dtype that a forward pass runs in: that of mixed precision as accelerate names it,
    else that of the weights.
    """
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    if mixed is not None:
        return mixed
    dtype: torch.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return dtype


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int | None:
    """Return the bytes of keys and values that one token takes in all layers.

    None for attention that keeps something else (latent, or no attention in every layer).
    """
    layers, size = getattr(config, "num_hidden_layers", None), head_size(config)
    if not layers or size is None:
        return None
    if any("linear" in kind or "mamba" in kind for kind in getattr(config, "layer_types", None) or ()):
        return None
    key_value_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(layers * 2 * key_value_heads * size * dtype.itemsize)


def head_size(config: Any) -> int | None:
    """Return the width of an attention head; None for attention that keeps something else (latent)."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads or getattr(config, "kv_lora_rank", None) is not None:
        return None
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)
