"""Tiny random models of the families that people train, each with what its family has beside plain layers."""

from __future__ import annotations

import copy
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
_WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
_GEMMA4 = {"global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 32}
_GLM4 = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_LFM2 = {"conv_dim": 64, "block_dim": 64, "block_auto_adjust_ff_dim": False}
# Softer weights: in fp32 the two forms of a recurrence differ by more than 1e-4 with those above.
_HYBRID: dict[str, Any] = {**_COMMON, "num_hidden_layers": 3, "initializer_range": 0.1}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_QWEN3_5: dict[str, Any] = {
    **{**_COMMON, "initializer_range": 0.1, "layer_types": _LINEAR[:2]},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
}
_QWEN3_NEXT: dict[str, Any] = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
}
_NEMOTRON_H: dict[str, Any] = {
    **_COMMON,  # with its 0.3, so that time steps are below `time_step_min`
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    **{"moe_intermediate_size": 48, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32},
    "num_experts_per_tok": 2,
}
del _NEMOTRON_H["num_hidden_layers"]
_NEMOTRON_LAYERS = ["linear_attention", "mlp", "full_attention", "linear_attention"]
_GRANITE4: dict[str, Any] = {
    **{**_HYBRID, "layer_types": _LINEAR},
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    **{"shared_intermediate_size": 96, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
}

HYBRIDS = ("qwen3_5", "lfm2_hybrid", "nemotron_h", "qwen3_next", "granite4")
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # the names of the model and of its config, and its shape
    "gemma4": ("Gemma4", "Gemma4Text", {**_COMMON, **_WINDOW, **_GEMMA4, "vocab_size_per_layer_input": 320}),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", {**_COMMON, **_EXPERTS, "num_experts": 4}),
    "glm4_moe": ("Glm4Moe", "Glm4Moe", {**_COMMON, **_EXPERTS, **_GLM4}),
    "gpt_oss": ("GptOss", "GptOss", {**_COMMON, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # With AMX vLLM takes no convolution.
    "lfm2": ("Lfm2", "Lfm2", {**_COMMON, **_LFM2, "layer_types": ["full_attention"] * 2}),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Text", _QWEN3_5),
    "qwen3_next": ("Qwen3Next", "Qwen3Next", {**_HYBRID, "layer_types": _LINEAR, **_QWEN3_NEXT}),
    "lfm2_hybrid": ("Lfm2", "Lfm2", {**_HYBRID, **_LFM2, "layer_types": ["conv", "full_attention", "conv"]}),
    "nemotron_h": ("NemotronH", "NemotronH", {**_NEMOTRON_H, "layers_block_type": [*_NEMOTRON_LAYERS, "moe"]}),
    "granite4": ("GraniteMoeHybrid", "GraniteMoeHybrid", {**_GRANITE4, "num_local_experts": 4}),
    "nemotron_h_dense": ("NemotronH", "NemotronH", {**_NEMOTRON_H, "layers_block_type": [*_NEMOTRON_LAYERS, "mlp"]}),
    "granite4_dense": ("GraniteMoeHybrid", "GraniteMoeHybrid", {**_GRANITE4, "num_local_experts": 0}),
}


def tiny_family(name: str, seed: int = 0) -> Any:
    """Return a random model of this family in fp32, whose buffers are not what they start as."""
    import transformers

    torch.manual_seed(seed)
    kind, config, shape = _FAMILIES[name]
    made = getattr(transformers, f"{config}Config")(**copy.deepcopy(shape))
    model = getattr(transformers, f"{kind}ForCausalLM")(made).float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias")):
                buffer.uniform_(0.5, 1.5)
    return model
