"""Tiny random models of the families that people train, each with what its family has beside plain layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform, so that a wrong weight shows
    "bos_token_id": None,
    "eos_token_id": 316,
    "pad_token_id": None,
}
# 48: vLLM's kernel for CPUs pads it to 64
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}


def _gemma4() -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    layers = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32, "num_kv_shared_layers": 0}
    small = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320, "sliding_window": 64}
    return Gemma4ForCausalLM(Gemma4TextConfig(**_COMMON, **layers, **small))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_experts=4))


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**_COMMON, **_EXPERTS, **experts))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    return GptOssForCausalLM(GptOssConfig(**_COMMON, **layers, num_local_experts=4, num_experts_per_tok=2))


def _lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    own = {"layer_types": ["full_attention"] * 2, "conv_dim": 64, "block_dim": 64}  # with AMX vLLM takes no convolution
    return Lfm2ForCausalLM(Lfm2Config(**_COMMON, **own, block_auto_adjust_ff_dim=False))


def _qwen3_5() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 1}
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_COMMON, "initializer_range": 0.1}, **heads, **layers))


# Softer weights: in fp32 the two forms of a recurrence differ by more than 1e-4 with those above.
_HYBRID: dict[str, Any] = {**_COMMON, "num_hidden_layers": 3, "initializer_range": 0.1}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    heads = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    layers = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4}
    experts = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_HYBRID, **heads, **layers, **experts))


def _lfm2_hybrid() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    return Lfm2ForCausalLM(Lfm2Config(**_HYBRID, **layers, conv_dim=64, block_dim=64))


def _nemotron_h(last: str = "moe") -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    layers = ["linear_attention", "mlp", "full_attention", "linear_attention", last]
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
    experts = {"moe_intermediate_size": 48, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}
    shape = {**_HYBRID, "layers_block_type": layers, **mamba, **experts, "num_experts_per_tok": 2}
    shape["initializer_range"] = 0.3  # so that time steps are below `time_step_min`
    del shape["num_hidden_layers"]
    return NemotronHForCausalLM(NemotronHConfig(**shape))


def _granite4(n_experts: int = 4) -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    layers = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_chunk_size": 16}
    mlp = {"shared_intermediate_size": 96, "num_local_experts": n_experts, "num_experts_per_tok": 2}
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**_HYBRID, **layers, **_MAMBA, **mlp, position_embedding_type="rope")
    )


HYBRIDS = ("qwen3_5", "lfm2_hybrid", "nemotron_h", "qwen3_next", "granite4")
FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma4": _gemma4,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "lfm2": _lfm2,
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "lfm2_hybrid": _lfm2_hybrid,
    "nemotron_h": _nemotron_h,
    "granite4": _granite4,
    "nemotron_h_dense": functools.partial(_nemotron_h, "mlp"),
    "granite4_dense": functools.partial(_granite4, 0),
}


def tiny_family(name: str, seed: int = 0) -> Any:
    """Return a random model of this family in fp32, whose buffers are not what they start as."""
    torch.manual_seed(seed)
    model = FAMILIES[name]().float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias")):
                buffer.uniform_(0.5, 1.5)
    return model
