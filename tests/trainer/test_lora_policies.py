"""LoRA policies: how vLLM gets them, saving and resuming. What a saved model is opened with: `test_in_python.py`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

from toolgrpo.engines.adapters import merged_parameters, merges_exactly
from toolgrpo.errors import ConfigError
from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e


@pytest.fixture
def train(train_tiny: ModuleType, tiny_model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains a tiny policy with LoRA."""

    def run(out: str = "out", engine: str = "scripted", stop_after: int | None = None, **config: Any) -> Any:
        options = {"use_cpu": True, "vllm_max_model_length": 256, "learning_rate": 3e-2, **config}
        options["lr_scheduler_type"] = "constant"
        places = {"out": str(tmp_path / out), "model": str(tiny_model)}
        return train_tiny.run(train_tiny.Job(**places, engine=engine, lora=True, stop_after=stop_after, config=options))

    return run


def sums(model: Any) -> dict[str, float]:
    return {name: p.detach().double().abs().sum().item() for name, p in model.named_parameters()}


@pytest.mark.vllm
@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize("sync", ["merge", "adapter"])
def test_vllm_draws_from_the_adapter_that_is_trained(train: Any, tiny_model: Path, sync: str) -> None:
    result = train(engine="vllm_colocate", vllm_lora_sync=sync, max_steps=4)
    assert max(result["difference"]) < 1e-4
    base = sums(AutoModelForCausalLM.from_pretrained(tiny_model))
    moved = max(abs(result["weights"][name] - base[name]) / base[name] for name in base)
    assert moved > 1e-3, "without the adapter the difference would be large"


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm_colocate", marks=pytest.mark.needs_cpu_vllm)])
def test_four_bits_are_trained_or_refused(train: Any, engine: str) -> None:
    """Where the packages are, which no lock has, vLLM starts with the trainer's packed weights and is sent the adapter."""
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    asked: dict[str, Any] = {"engine": engine, "vllm_lora_sync": "adapter", "max_steps": 3}
    asked["model_init_kwargs"] = {"dtype": "bfloat16", "quantization_config": packed}
    if not all(map(find_spec, ["bitsandbytes", *["vllm_bnb_plugin"] * (engine == "vllm_colocate")])):
        with pytest.raises((ImportError, ConfigError), match="pip install "):
            train(**asked)
        return
    result = train(**asked)
    assert max(result["difference"]) < 0.5, "of any token, in bf16; without the adapter they were 1.08 apart"
    assert len(result["grad_norms"]) == 3 and min(result["grad_norms"]) > 0


def test_adapters_are_resumed_and_opened_with_plain_peft(train: Any, tiny_model: Path, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    whole = train("whole", **saving)
    train("stopped", stop_after=3, **saving)
    resumed = train("stopped", resume_from_checkpoint="auto", **saving)
    assert resumed["losses"] == whole["losses"] and resumed["weights"] == whole["weights"]
    last = complete_checkpoints(tmp_path / "whole")[-1].path
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), last).merge_and_unload()
    assert sums(opened) == pytest.approx(whole["weights"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "trained",
    [{"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["norm"]}, {"trainable_token_indices": [5, 6]}],
    ids=["whole modules", "rows of single tokens"],
)
def test_handing_weights_over_does_not_move_the_base_model(tiny_qwen3: Any, dtype: torch.dtype, trained: Any) -> None:
    """And gives what PEFT's own merge gives (in bf16 PEFT rounds the adapter's part first)."""
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **trained})
    model = get_peft_model(tiny_qwen3(0).to(dtype), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.manual_seed(len(name))
            parameter.data.normal_(std=0.3)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert merges_exactly(model)
    found = {name: tensor.clone() for name, tensor in merged_parameters(model)}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert found[name].dtype == parameter.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(found[name], parameter.data)


def test_of_several_copies_of_a_whole_module_the_active_one_is_sent() -> None:
    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    untied = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1))
    model = get_peft_model(untied, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.add_adapter("ref", model.peft_config["default"])  # as TRL does for a reference
    assert [name for name, _ in merged_parameters(model) if "lm_head" in name] == ["lm_head.weight"]


def test_a_merge_that_would_not_be_exact_is_known(tiny_qwen3: Any) -> None:
    assert not merges_exactly(tiny_qwen3(0))
    assert not merges_exactly(get_peft_model(tiny_qwen3(0), LoraConfig(target_modules=["q_proj"], use_dora=True)))
    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    with_bias = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1))
    assert not merges_exactly(get_peft_model(with_bias, LoraConfig(target_modules=["q_proj"], lora_bias=True)))
