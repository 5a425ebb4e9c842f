"""Build the engine a trainer asks for."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from toolgrpo.engines.adapters import adapter_config, adapter_saver, base_model, base_weights
from toolgrpo.engines.base import Engine
from toolgrpo.engines.choose import EngineChoice, choose_engine
from toolgrpo.errors import ConfigError

__all__ = ["build_engine", "compute_dtype"]


def build_engine(trainer: Any) -> tuple[Engine, EngineChoice]:
    """The engine for this trainer's model and arguments, and why it is that one."""
    args = trainer.args
    choice = choose_engine(args.engine, server_urls=args.server_urls())
    build = {"vllm_colocate": _vllm_colocate, "vllm_server": _vllm_server, "transformers": _transformers}[choice.name]
    return build(trainer), choice


def compute_dtype(trainer: Any) -> torch.dtype:
    """The dtype the trainer's forward pass runs in; an engine of ours uses the same."""
    if trainer.args.bf16:
        return torch.bfloat16
    if trainer.args.fp16:
        return torch.float16
    dtype: torch.dtype = next(trainer.model.parameters()).dtype
    return dtype


def _vllm_colocate(trainer: Any) -> Engine:
    from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
    from toolgrpo.engines.vllm_seam import VLLMOptions, start_vllm

    args = trainer.args
    if args.vllm_tensor_parallel_size > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size is {args.vllm_tensor_parallel_size}, but colocated vLLM runs one copy per "
            f"process. For tensor parallelism start `vllm serve --tensor-parallel-size "
            f"{args.vllm_tensor_parallel_size}` and use --engine vllm_server --vllm_server_urls URL."
        )
    if args.vllm_enable_sleep_mode and not torch.cuda.is_available():
        raise ConfigError(
            "vllm_enable_sleep_mode gives GPU memory back between rollouts, but there is no GPU here; leave it out."
        )
    base = base_model(trainer)
    config = type(base.config).from_dict({**base.config.to_dict(), "architectures": [type(base).__name__]})
    episodes = args.per_device_train_batch_size * args.steps_per_generation
    options = VLLMOptions(
        dtype=compute_dtype(trainer),
        max_model_len=args.vllm_max_model_length,
        max_num_seqs=args.max_concurrent_episodes or episodes,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        kv_cache_gib=args.vllm_kv_cache_gib,
        enforce_eager=args.vllm_enforce_eager,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed + trainer.accelerator.process_index,
    )
    save_adapter = adapter_saver(trainer)
    if save_adapter is None:
        return VLLMColocateEngine(start_vllm(config, options))
    options = replace(options, lora_rank=adapter_config(trainer).r)
    return VLLMColocateEngine(start_vllm(config, options, base_weights(base)), save_adapter)


def _vllm_server(trainer: Any) -> Engine:
    from toolgrpo.engines.server_weights import choose_road
    from toolgrpo.engines.vllm_server import VLLMServerEngine

    args, accelerator = trainer.args, trainer.accelerator
    urls = args.server_urls()
    (run_id,) = broadcast_object_list([uuid.uuid4().hex[:12]])  # the same in every process
    return VLLMServerEngine(
        urls,
        vocabulary=base_model(trainer).config.get_text_config().vocab_size,
        weights=choose_road(
            urls,
            device=accelerator.device,
            folder=Path(args.output_dir) / "vllm_weights",
            run_id=run_id,
            save_adapter=adapter_saver(trainer),
            ready_timeout_s=args.vllm_server_timeout,
            timeout_s=args.engine_timeout,
            group_port=args.vllm_group_port,
        ),
        timeout_s=args.engine_timeout,
        retries=args.engine_retries,
        ready_timeout_s=args.vllm_server_timeout,
        is_main_process=accelerator.is_main_process,
        wait_for_everyone=accelerator.wait_for_everyone,
    )


def _transformers(trainer: Any) -> Engine:
    from toolgrpo.engines.split_parameters import ReplicaEngine
    from toolgrpo.engines.transformers import TransformersEngine

    args = trainer.args
    options: dict[str, Any] = {
        "max_model_len": args.vllm_max_model_length,
        "max_rows": args.max_concurrent_episodes or args.per_device_train_batch_size * args.steps_per_generation,
        "seed": args.seed + trainer.accelerator.process_index,
    }
    if trainer.backend.splits_parameters:
        base = base_model(trainer)
        replica = type(base)(base.config).to(trainer.accelerator.device, compute_dtype(trainer))
        return ReplicaEngine(replica, **options)
    return TransformersEngine(lambda: trainer.accelerator.unwrap_model(trainer.model), **options)
