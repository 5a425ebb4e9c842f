"""Choose and build the engine for a policy: the one list of engines.

An engine is a file, a row in `ENGINES` here, which alone tells it from others, and a value of `--engine` (`options.py`).
"""

from __future__ import annotations

import copy
import importlib.util
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from accelerate.utils import broadcast_object_list

from toolgrpo.engines.adapters import adapter_config, adapter_saver, base_weights
from toolgrpo.engines.base import CHAT_API, NO_TOKENS, Engine
from toolgrpo.engines.decode_batch import bound_time_steps_as_trained
from toolgrpo.engines.policy import Policy, head_size
from toolgrpo.engines.vllm_options import (
    BATCHED_TOKENS,
    CPU_DELTA_RULE_SIZES,
    CPU_HEAD_SIZES,
    ServerOptions,
    VLLMOptions,
    served_config,
    vllm_available,
    vllm_is_for_cpu,
)
from toolgrpo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine that is asked for (`auto` or a name of `ENGINES`), what any engine in this process is asked, and
    what vLLM is. Of `vllm`, the limits, the seed and the dtype are filled in as it starts.
    """

    engine: str = "auto"
    max_model_len: int | None = None
    max_rows: int = 64  # sequences that are decoded at a time
    seed: int = 0  # each process adds its number
    own_copy: bool = False  # of the weights, so that the policy can be trained meanwhile
    lora_sync: str = "merge"  # what is sent to vLLM of a LoRA policy
    vllm: VLLMOptions = field(default_factory=VLLMOptions)
    tensor_parallel_size: int = 1  # of vLLM in this process; more is refused
    vllm_server: ServerOptions = field(default_factory=ServerOptions)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The name of an engine, and why it is that one, in a few words."""

    name: str
    why: str


class BuiltEngine(NamedTuple):
    engine: Engine
    choice: EngineChoice
    context: str | None = None  # how it was suited to its rows, if it was


_GRAPHS = int(0.85 * 2**30)  # what vLLM takes for its CUDA graphs: estimated
_NOT_RELOADED = ("gpt_oss",)  # vLLM writes experts and sinks past its own reload, on every device
_DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_UNPACKERS = ("bitsandbytes", "vllm_bnb_plugin")
_WRONG_ON_GPU = ("nemotron_h",)  # decoded by the transformers engine (tests/engines/test_engine_contract.py)
_WRONG_ON_CPU = ("lfm2", "lfm2_moe")  # vLLM hands its rotary kernel for CPUs what that one misreads


def build_engine(policy: Policy, options: EngineOptions) -> BuiltEngine:
    """Return the engine for this policy, and why it is that one."""
    choice = choose_engine(options, policy)
    bound_time_steps_as_trained(policy.base_model)
    return BuiltEngine(ENGINES[choice.name].build(policy, options), choice)


def choose_engine(options: EngineOptions, policy: Policy | None = None) -> EngineChoice:
    """Resolve `auto`, and refuse what cannot work here, or for this policy."""
    engine, server_urls = options.engine, options.vllm_server.urls
    if engine == CHAT_API:
        raise ConfigError(NO_TOKENS)
    adapter_alone = options.lora_sync == "adapter"  # nothing else is sent after vLLM's start
    unsendable = None if policy is None else _unsendable(policy, adapter_alone)
    unfit = None
    if policy is not None and not unsendable:  # why vLLM in this process cannot draw from it
        unfit = _on_another_device(policy) or _odd_heads(policy) or _wrong_numbers(policy) or _cannot_unpack(policy)
    if engine == "auto":
        if server_urls and not unsendable:
            return EngineChoice("vllm_server", "server URLs are configured")
        if not vllm_available():
            return EngineChoice("transformers", "vLLM is not installed")
        if unsendable or unfit:
            return EngineChoice("transformers", (unsendable or unfit or "").partition(": ")[0])
    elif engine == "vllm_colocate" and not vllm_available():
        raise ConfigError(
            "engine vllm_colocate needs vLLM, which is not installed: `pip install 'toolgrpo[cuda]'` with CUDA, "
            "requirements-user.lock of a clone on a CPU (its first lines say how), or use engine transformers."
        )
    elif engine == "vllm_server" and not server_urls:
        raise ConfigError("engine vllm_server needs --vllm_server_urls, e.g. http://localhost:8000")
    elif engine.startswith("vllm") and unsendable:
        raise ConfigError(f"engine {engine} is sent weights as they are trained, and {unsendable}")
    elif engine == "vllm_colocate" and unfit:
        raise ConfigError(f"engine vllm_colocate cannot run here: {unfit}. Use --engine transformers")
    return EngineChoice("vllm_colocate", "vLLM is installed") if engine == "auto" else EngineChoice(engine, "asked for")


def planned_engine(options: EngineOptions, *, packed: bool, with_vllm: bool) -> str:
    """Return the engine that is likely chosen for a policy that is not loaded, on a machine with or without vLLM."""
    here = "vllm_colocate" if with_vllm and (not packed or options.lora_sync == "adapter") else "transformers"
    return options.engine if options.engine != "auto" else "vllm_server" if options.vllm_server.urls else here


def _unsendable(policy: Policy, adapter_alone: bool) -> str | None:
    """Return why no vLLM can be given this policy's weights, a colon and what to do; or None."""
    if policy.is_quantized and not (adapter_alone and policy.is_in_4_bits):
        return (
            "the policy's weights are packed (4 or 8 bits): use --engine transformers with --load_in_4bit or "
            "--load_in_8bit, or leave those out; with 4 bits --vllm_lora_sync adapter sends the adapter alone"
        )
    if _adapts_tied_weights(policy):
        return (
            "the adapter changes lm_head or the embeddings, which this model has in common, and vLLM would change both: use "
            "--engine transformers, or leave them out of --lora_target_modules"
        )
    kind = _kind(policy)
    if kind in _NOT_RELOADED and not adapter_alone:
        return (
            f"vLLM would keep the experts and attention sinks of {kind} that it started with: use --engine "
            f"transformers, or train an adapter with --use_peft and --vllm_lora_sync adapter"
        )
    return None


def _adapts_tied_weights(policy: Policy) -> bool:
    configs = getattr(policy.get_model(), "peft_config", {}).values()
    if not configs or any(getattr(one, "ensure_weight_tying", False) for one in configs):  # which changes both alike
        return False
    shared = [policy.base_model.get_input_embeddings(), policy.base_model.get_output_embeddings()]
    bases = [
        getattr(getattr(one, "base_layer", getattr(one, "original_module", one)), "weight", None) for one in shared
    ]
    return (
        bases[0] is not None
        and bases[0] is bases[1]
        and any(hasattr(module, "base_layer") or hasattr(module, "modules_to_save") for module in shared)
    )


def _wrong_numbers(policy: Policy) -> str | None:
    kind = _kind(policy)
    if policy.device.type == "cpu" and kind in _WRONG_ON_CPU:
        return f"vLLM on a CPU computes other numbers for {kind} than it was trained with"
    if policy.device.type == "cpu" and kind in _DELTA_RULE:
        size = policy.base_model.config.get_text_config().linear_key_head_dim
        vision = kind == "qwen3_next" or importlib.util.find_spec("torchvision") is not None
        if not (vision and policy.dtype == torch.bfloat16 and size in CPU_DELTA_RULE_SIZES):
            return (
                f"vLLM on a CPU cannot run this {kind}: it needs bf16 (--bf16 true; here it is {policy.dtype}), linear-"
                f"attention heads {' or '.join(map(str, CPU_DELTA_RULE_SIZES))} wide (here {size}), and torchvision "
                f"({'installed' if vision else 'missing; https://download.pytorch.org/whl/cpu has it'})"
            )
    return None


def _cannot_unpack(policy: Policy) -> str | None:
    """Return why vLLM in this process cannot read 4-bit weights, or None: since 0.28 a plugin does it, in bf16 alone."""
    if not policy.is_quantized:
        return None
    missing = [name.replace("_", "-") for name in _UNPACKERS if importlib.util.find_spec(name) is None]
    if missing:
        return f"vLLM does not read 4-bit weights by itself: pip install {' '.join(missing)}"
    wide = policy.dtype == torch.float32
    return "vLLM computes with 4-bit weights in bf16, but training is in float32: add --bf16 true" if wide else None


def _kind(policy: Policy) -> str:
    return str(policy.base_model.config.get_text_config().model_type)


def _on_another_device(policy: Policy) -> str | None:
    """Return why vLLM in this process would not run where the policy does, or None."""
    if not vllm_available():
        return None
    on_cpu = policy.device.type == "cpu"
    if on_cpu and not vllm_is_for_cpu():
        return "training is on the CPU, and this build of vLLM runs on a GPU"
    if not on_cpu and vllm_is_for_cpu():
        return f"training is on {policy.device.type}, and this build of vLLM runs on the CPU"
    return None


def _odd_heads(policy: Policy) -> str | None:
    """Return why vLLM's kernels for CPUs would fail at the first step, or None."""
    size = head_size(policy.base_model.config.get_text_config())
    if not vllm_available() or policy.device.type != "cpu" or size is None or size in CPU_HEAD_SIZES:
        return None
    return (
        f"the model's attention heads are {size} wide, and vLLM on a CPU computes {', '.join(map(str, CPU_HEAD_SIZES))}"
    )


def _vllm_colocate(policy: Policy, options: EngineOptions) -> Engine:
    from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
    from toolgrpo.engines.vllm_seam import start_vllm

    if options.tensor_parallel_size > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size is {options.tensor_parallel_size}, but colocated vLLM runs one copy per "
            f"process. For tensor parallelism start `vllm serve --tensor-parallel-size "
            f"{options.tensor_parallel_size}` and use engine vllm_server with its URL in vllm_server_urls."
        )
    if options.vllm.enable_sleep_mode and policy.device.type == "cpu":
        raise ConfigError(
            "vllm_enable_sleep_mode gives GPU memory back between rollouts, but training is on the CPU; leave it out."
        )
    base = policy.base_model
    config = served_config(base, packed=policy.is_quantized)
    start = replace(
        options.vllm,
        dtype=policy.dtype,
        packed=policy.is_quantized,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_rows,
        seed=options.seed + policy.process_index,
    )
    if options.lora_sync == "merge":
        return VLLMColocateEngine(start_vllm(config, start))
    if policy.device.type == "cuda" and policy.dtype == torch.float32:
        raise ConfigError(
            "vllm_lora_sync adapter needs 16 bits on a GPU, because vLLM's kernels there compute adapters only in 16 bits, "
            "and this model computes in float32; add --dtype bfloat16 (or --bf16 true), or set vllm_lora_sync to merge"
        )
    save_adapter = adapter_saver(policy)
    lora = adapter_config(policy.model)
    start = replace(start, lora_rank=max(lora.r, *(lora.rank_pattern or {}).values(), 1))
    return VLLMColocateEngine(start_vllm(config, start, base_weights(base)), save_adapter)


def _vllm_server(policy: Policy, options: EngineOptions) -> Engine:
    from toolgrpo.engines.server_transfer import choose_weight_route
    from toolgrpo.engines.vllm_server import VLLMServerEngine

    asked = options.vllm_server
    (run_id,) = broadcast_object_list([uuid.uuid4().hex[:12]])  # the same in every process
    return VLLMServerEngine(
        asked,
        max_model_len=options.max_model_len,
        vocabulary=policy.base_model.config.get_text_config().vocab_size,
        weights=choose_weight_route(
            asked,
            device=policy.device,
            run_id=run_id,
            save_adapter=None if options.lora_sync == "merge" else adapter_saver(policy),
            process_index=policy.process_index,
        ),
        is_main_process=policy.is_main_process,
        wait_for_everyone=policy.wait_for_everyone,
    )


def _transformers(policy: Policy, options: EngineOptions) -> Engine:
    from toolgrpo.engines.transformers import ReplicaEngine, TransformersEngine

    if policy.device.type == "cuda" and _kind(policy) in _WRONG_ON_GPU:
        raise ConfigError(
            f"engine transformers does not sample from {_kind(policy)} on a GPU: on an H100 its log-probabilities were up "
            f"to 2.1 off the trainer's, for an unknown reason. Use --engine vllm_colocate or vllm_server"
        )
    seed = options.seed + policy.process_index
    base = policy.base_model
    if policy.backend.splits_parameters or options.own_copy:
        if policy.is_quantized:
            raise ConfigError(
                f"{policy.backend} splits the parameters, and the policy's weights are packed (4 or 8 bits), which the "
                f"engine's whole copy cannot be; use DDP or ZeRO-2, or leave --load_in_4bit and --load_in_8bit out"
            )
        if _adapts_tied_weights(policy):
            raise ConfigError(
                "the adapter changes lm_head or the embeddings, which this model has in common, and the engine's whole copy "
                "would change both or neither; leave them out of --lora_target_modules and --lora_modules_to_save, or use "
                "max_staleness 0 on DDP or ZeRO-2"
            )
        # With a config of its own: the shared pass names its attention in the trainer's while the copy may decode.
        replica = type(base)(copy.deepcopy(base.config)).to(policy.device)
        for parameter in replica.parameters():  # not the buffers, of which angles of positions stay in fp32
            parameter.data = parameter.data.to(policy.dtype)
        return ReplicaEngine(replica, max_model_len=options.max_model_len, max_rows=options.max_rows, seed=seed)
    if not policy.is_quantized:
        base.to(policy.device)  # DeepSpeed does it when training begins; episodes may come before
    return TransformersEngine(
        policy.get_model, max_model_len=options.max_model_len, max_rows=options.max_rows, seed=seed
    )


class MemoryFacts(NamedTuple):
    """The sizes that the memory of an engine depends on, beside its options, in bytes."""

    device: int
    on_cpu: bool
    copy: int  # of the model's weights, as they are computed with
    caches: int  # keys and values of all episodes at a time, each as long as it may be
    a_token: int  # in a forward pass
    scores: int  # of the next token of all these episodes


class EngineMemory(NamedTuple):
    """The bytes that an engine takes of the trainer's device."""

    name: str = ""
    taken: int = 0
    copy: int = 0  # of the weights, beside
    cache: int | None = None  # keys and values, where their room has a size from the start on
    until_pass: bool = False  # what is taken is given back before a training pass


def _memory_of_colocated(options: EngineOptions, facts: MemoryFacts) -> EngineMemory:
    vllm = options.vllm
    taken = facts.copy + (cache := vllm.kv_cache_gib * 2**30)
    if not facts.on_cpu:
        taken = int(vllm.gpu_memory_utilization * facts.device)
        cache = max(0, taken - facts.copy - BATCHED_TOKENS * facts.a_token - facts.scores - _GRAPHS)
    return EngineMemory("vLLM", taken, cache=cache, until_pass=vllm.enable_sleep_mode)


def _memory_of_transformers(options: EngineOptions, facts: MemoryFacts) -> EngineMemory:
    return EngineMemory(
        "generation", facts.caches, facts.copy if options.own_copy else 0, until_pass=not options.own_copy
    )


class EngineKind(NamedTuple):
    """Builder of an engine, and facts about it that count before it is built."""

    build: Callable[[Policy, EngineOptions], Engine]
    memory: Callable[[EngineOptions, MemoryFacts], EngineMemory] = lambda options, facts: EngineMemory()
    stands_alone: bool = False  # in this process: it holds all weights itself, and is sized at its start


ENGINES = {
    "vllm_colocate": EngineKind(_vllm_colocate, _memory_of_colocated, stands_alone=True),
    "vllm_server": EngineKind(_vllm_server),
    "transformers": EngineKind(_transformers, _memory_of_transformers),
}
