"""LoRA policies: how vLLM gets them, saving and resuming. What a saved model is opened with: `test_in_python.py`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

from toolgrpo.errors import ConfigError
from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e


def job(train_tiny: ModuleType, out: Path, model: Path, engine: str = "scripted", **config: Any) -> Any:
    options = {
        "use_cpu": True,
        "vllm_max_model_length": 256,
        "learning_rate": 3e-2,
        "lr_scheduler_type": "constant",
        **config,
    }
    return train_tiny.Job(out=str(out), model=str(model), engine=engine, lora=True, config=options)


@pytest.mark.vllm
@pytest.mark.needs_cpu_vllm
@pytest.mark.parametrize("sync", ["merge", "adapter"])
def test_vllm_draws_from_the_adapter_that_is_trained(
    train_tiny: ModuleType, tiny_model: Path, tmp_path: Path, sync: str
) -> None:
    result = train_tiny.run(job(train_tiny, tmp_path, tiny_model, "vllm_colocate", vllm_lora_sync=sync, max_steps=4))
    assert max(result["difference"]) < 1e-4
    assert change_of_adapter(tiny_model, result) > 1e-3, "without the adapter the difference would be large"


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm_colocate", marks=pytest.mark.needs_cpu_vllm)])
def test_four_bits_are_trained_or_refused(
    train_tiny: ModuleType, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    """Where the packages are, which no lock has, vLLM starts with the trainer's packed weights and is sent the adapter."""
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    asked = {"max_steps": 3, "model_init_kwargs": {"dtype": "bfloat16", "quantization_config": packed}}
    run = job(train_tiny, tmp_path, tiny_model, engine, vllm_lora_sync="adapter", **asked)
    if not all(map(find_spec, ["bitsandbytes", *["vllm_bnb_plugin"] * (engine == "vllm_colocate")])):
        with pytest.raises((ImportError, ConfigError), match="pip install "):
            train_tiny.run(run)
        return
    result = train_tiny.run(run)
    assert max(result["difference"]) < 0.5, "of any token, in bf16; without the adapter they were 1.08 apart"
    assert len(result["grad_norms"]) == 3 and min(result["grad_norms"]) > 0


def change_of_adapter(model: Path, result: dict[str, Any]) -> float:
    """How far the trained weights are from the base model's, as a share."""
    from transformers import AutoModelForCausalLM

    base = {
        name: p.detach().double().abs().sum().item()
        for name, p in AutoModelForCausalLM.from_pretrained(model).named_parameters()
    }
    moved: float = max(abs(result["weights"][name] - base[name]) / base[name] for name in base)
    return moved


def test_adapters_are_resumed_and_opened_with_plain_peft(
    train_tiny: ModuleType, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saving: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    whole = train_tiny.run(job(train_tiny, tmp_path / "whole", tiny_model, **saving))
    stopped = job(train_tiny, tmp_path / "stopped", tiny_model, **saving)
    train_tiny.run(train_tiny.Job(**{**vars(stopped), "stop_after": 3}))
    resumed = train_tiny.run(
        train_tiny.Job(**{**vars(stopped), "config": {**stopped.config, "resume_from_checkpoint": "auto"}})
    )
    assert resumed["losses"] == whole["losses"] and resumed["weights"] == whole["weights"]
    last = complete_checkpoints(tmp_path / "whole")[-1].path
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), last).merge_and_unload()
    found = {name: p.detach().double().abs().sum().item() for name, p in opened.named_parameters()}
    assert found == pytest.approx(whole["weights"], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_handing_weights_over_does_not_move_the_base_model(tiny_qwen3: Any, dtype: torch.dtype) -> None:
    """And gives what PEFT's own merge gives (in bf16 PEFT rounds the adapter's part first)."""
    from peft import LoraConfig, get_peft_model

    from toolgrpo.engines.adapters import merged_parameters, merges_exactly

    config = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["norm"])
    model = get_peft_model(tiny_qwen3(0).to(dtype), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
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
            torch.testing.assert_close(found[name], parameter)
    assert not merges_exactly(tiny_qwen3(0))
    dora = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    assert not merges_exactly(dora)


def test_rows_of_single_tokens_reach_the_engine_beside_lora(tiny_qwen3: Any) -> None:
    from peft import LoraConfig, get_peft_model

    from toolgrpo.engines.adapters import merged_parameters, merges_exactly

    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    model = get_peft_model(tiny_qwen3(0), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.manual_seed(len(name))
            parameter.data.normal_(std=0.3)
    assert merges_exactly(model)
    found = {name: tensor.clone() for name, tensor in merged_parameters(model)}
    expected = dict(model.merge_and_unload().named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter.data)
