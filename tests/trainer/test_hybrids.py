"""Hybrids train with tools and with prompts shared: through the transformers engine, and through vLLM where it has kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.support.model_families import HYBRIDS, tiny_family
from toolgrpo.commands.job import LORA_TARGETS
from toolgrpo.testing.trainers import tiny_trainer


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(
    ("family", "engine"),
    [
        *((name, "transformers") for name in HYBRIDS[:3]),
        *(pytest.param(name, "transformers", marks=pytest.mark.slow) for name in HYBRIDS[3:]),
        *(
            pytest.param(name, "vllm_colocate", marks=[pytest.mark.slow, pytest.mark.needs_cpu_vllm])
            for name in ("nemotron_h_dense", "granite4_dense")
        ),
    ],
)
def test_two_steps_with_tools(tmp_path: Path, family: str, engine: str, adapter: bool) -> None:
    def by_length(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 4) for number in range(len(completions))]

    lora = LoraConfig(r=4, target_modules=LORA_TARGETS) if adapter else None
    given: dict[str, Any] = {"model": tiny_family(family), "parts": {"tools": [add], "peft_config": lora}}
    given |= {"max_completion_length": 24, "router_aux_loss_coef": 0.0, "learning_rate": 1e-3}
    trainer = tiny_trainer(tmp_path, by_length, None, engine=engine, prefix_sharing="on", **given)
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    after = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    steps = trainer.state.log_history[:2]
    assert all(0 < step["grad_norm"] < 1e3 for step in steps) and len(steps) == 2
    if engine != "transformers":
        assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps)
