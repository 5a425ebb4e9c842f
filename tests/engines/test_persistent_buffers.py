"""An engine is handed what `state_dict()` has: parameters and persistent buffers, whatever wraps the model."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.model_families import tiny_family
from toolgrpo.engines.adapters import base_weights, own_weights
from toolgrpo.engines.transformers import ReplicaEngine
from toolgrpo.trainer.trl.trainer import iter_named_params

BUFFERS = {"gemma4": "model.layers.0.layer_scalar", "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias"}


def walked(model: Any) -> dict[str, torch.Tensor]:
    """What a trainer of this model hands over, in one process."""
    trainer = SimpleNamespace(
        model=model,
        accelerator=None,
        backend=SimpleNamespace(splits_parameters=False),
        _dist=SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext()),
    )
    return dict(iter_named_params(trainer))


@pytest.mark.parametrize("family", BUFFERS)
@pytest.mark.parametrize("adapter", [None, {}, {"use_dora": True}], ids=["whole model", "LoRA", "DoRA"])
def test_the_trainer_hands_over_what_state_dict_has(family: str, adapter: dict[str, Any] | None) -> None:
    model = tiny_family(family)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert BUFFERS[family] in expected
    if adapter is not None:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"], **adapter))
        under = base_weights(model.get_base_model())
        torch.testing.assert_close(under[BUFFERS[family]], expected[BUFFERS[family]])
    found = walked(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_a_copy_of_the_model_gets_them_too() -> None:
    trained, copy = tiny_family("gemma4"), tiny_family("gemma4", seed=1)
    ReplicaEngine(copy, max_model_len=64).load_weights(own_weights(trained))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, trained(ids).logits)
