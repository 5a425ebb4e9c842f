"""A LoRA layer in one step of autograd against PEFT's own forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from toolgrpo.engines.adapters import merges_exactly
from toolgrpo.models.adapter_step import AdapterStep, JoinedLinear, join_adapters, may_join


def adapted(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 24, bias=False)).to(dtype)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["0", "2"], **options})
    model = get_peft_model(layers, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def passed(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what a model makes of x, and the gradients of x and of the adapter."""
    x = x.clone().requires_grad_()
    out = model(x)
    (out.float() ** 2).sum().backward()
    assert x.grad is not None
    return out, [x.grad.float(), *(one.grad for one in model.parameters() if one.grad is not None)]


def test_it_is_the_sum_and_has_its_gradients() -> None:
    torch.manual_seed(0)
    sizes = ((2, 5, 3), (7, 3), (7,), (2, 3), (7, 2))
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    x, weight, bias, down, up = given
    assert torch.allclose(AdapterStep.apply(*given, 0.5), x @ weight.T + bias + 0.5 * (x @ down.T) @ up.T)
    frozen = (weight.detach(), bias.detach())

    def step(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> Any:
        # The adapter's gradients come back in the dtype that the products had.
        return AdapterStep.apply(x, *frozen, down, up, 0.5)

    assert torch.autograd.gradcheck(step, (x, down, up))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_in_16_bits_it_is_as_near_to_the_truth_as_peft(checkpointed: bool) -> None:
    model, x = adapted(), torch.randn(3, 11, 24, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    joined = copy.deepcopy(model)
    join_adapters(joined)
    assert may_join(model) and {type(one) for one in joined.modules() if hasattr(one, "lora_A")} == {JoinedLinear}
    assert joined.state_dict().keys() == model.state_dict().keys() and merges_exactly(joined)
    if checkpointed:
        inner = joined.forward
        joined.forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
    truth, ways = passed(exact, x.double()), (passed(model, x), passed(joined, x))
    peft, ours = ([off(out, truth[0]), *map(off, grads, truth[1])] for out, grads in ways)
    assert all(one.dtype == torch.float32 for one in ways[1][1][1:]), "what is trained stays in 32 bits"
    assert all(mine < max(2 * theirs, 0.01) for mine, theirs in zip(ours, peft, strict=True)), (ours, peft)


def off(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float(((value - truth).norm() / truth.norm()).detach())


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}], ids=repr)
def test_what_is_no_plain_adapter_is_peft_s(options: dict[str, Any]) -> None:
    model, x = adapted(**options), torch.randn(3, 24, dtype=torch.bfloat16)
    joined = copy.deepcopy(model)
    join_adapters(joined)
    assert not may_join(model)
    outputs = []
    for one in (model, joined):
        torch.manual_seed(1)
        outputs.append(one(x))
    assert torch.equal(*outputs)


def test_a_bias_that_is_trained_gets_its_gradient() -> None:
    model = adapted(bias="all")
    join_adapters(model)
    model(torch.randn(3, 24, dtype=torch.bfloat16)).sum().backward()
    assert not may_join(model) and all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_in_32_bits_and_without_its_adapter_nothing_changes() -> None:
    wide, x = adapted(torch.float32), torch.randn(3, 24)
    before = wide(x)
    join_adapters(wide)
    assert torch.equal(wide(x), before)
    narrow, x = adapted(), torch.randn(3, 24, dtype=torch.bfloat16)
    join_adapters(narrow)
    with narrow.disable_adapter():
        assert torch.equal(narrow(x), narrow.get_base_model()(x))
        base = narrow(x)
    assert not torch.equal(narrow(x), base)
    narrow.merge_adapter()
    merged = narrow(x)
    narrow.unmerge_adapter()
    assert off(merged.float(), narrow(x).float()) < 0.02


def test_autocast_to_another_width_is_peft_s() -> None:
    model, x = adapted(), torch.randn(3, 24, dtype=torch.bfloat16)
    joined = copy.deepcopy(model)
    join_adapters(joined)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(model(x), joined(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert off(model(x).float(), joined(x).float()) < 0.02
