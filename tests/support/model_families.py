"""Tiny random models of the families that people train, each with what its family has beside plain layers."""

from __future__ import annotations

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
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_COMMON, **heads, **layers))


FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma4": _gemma4,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "lfm2": _lfm2,
    "qwen3_5": _qwen3_5,
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
