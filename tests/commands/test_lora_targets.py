"""Which modules LoRA adapts when the user names none: the projections of every layer, in each model family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.model_families import tiny_family
from toolgrpo.commands.job import LORA_TARGETS

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("qwen3", "gemma3_text", "cohere2", "phi3", "glm4", "olmo2")},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
}
# What is not adapted: gates, routers, and the projection that a kernel for the whole layer reads itself. In Qwen3-Next
# PEFT adapts the routed experts instead of the shared one.
HYBRIDS = {
    "qwen3_5": {"linear_attn.in_proj_a", "linear_attn.in_proj_b"},
    "qwen3_next": {
        *("linear_attn.in_proj_ba", "mlp.shared_expert_gate"),
        *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    },
    "lfm2_hybrid": set(),
    "nemotron_h": {"mixer.out_proj"},
    "granite4": {"mamba.out_proj"},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_projections_of_hybrids_are_adapted_and_nothing_narrow(family: str) -> None:
    model = get_peft_model(tiny_family(family), LoraConfig(target_modules=LORA_TARGETS))
    names = {name for name, module in tiny_family(family).named_modules() if isinstance(module, torch.nn.Linear)}
    left = {name for name in names if ".layers." in name} - set(model.base_model.targeted_module_names)
    assert {".".join(name.rsplit(".", 2)[1:]) for name in left} == HYBRIDS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_is_adapted(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]}))
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    projections = {name.rpartition(".")[2] for name in linear if ".layers." in name}
    assert projections and projections <= set(LORA_TARGETS), projections - set(LORA_TARGETS)
