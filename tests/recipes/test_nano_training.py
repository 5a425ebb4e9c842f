"""Supervised training: the mask, the shared prefix, the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipes.nano.training import SupervisedLoss, collate, orthogonalised, train
from toolgrpo.sft.encoder import Example

PREFIXES = [tuple(range(1, 21)), tuple(range(20, 0, -1))]  # long enough to be shared
TAILS = [
    Example((8, 9, 10, 11), (0, 0, 1, 1)),
    Example((9, 8), (0, 1)),
    Example((12, 13, 14), (0, 1, 1)),
    Example((15, 16), (0, 1)),
]
EXAMPLES = [
    Example(PREFIXES[index // 2] + tail.ids, (0,) * len(PREFIXES[index // 2]) + tail.mask)
    for index, tail in enumerate(TAILS)
]


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=31,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def _gradients(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def _cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    """By transformers alone."""
    labels = batch.ids.masked_fill(~batch.loss_mask, -100)
    return model(input_ids=batch.ids, attention_mask=batch.attention_mask, labels=labels).loss


@pytest.mark.parametrize("examples", [EXAMPLES, TAILS], ids=["shared", "padded"])
def test_loss_and_gradients_are_those_of_transformers(model: Any, examples: list[Example]) -> None:
    batch = collate(examples, 0)
    expected_loss, expected = _gradients(model, _cross_entropy(model, batch))
    loss, gradients = _gradients(model, SupervisedLoss(model)(batch))
    torch.testing.assert_close(loss, expected_loss)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_shared_beginning_is_computed_once(model: Any) -> None:
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    SupervisedLoss(model)(collate(EXAMPLES, 0))
    assert seen == [sum(map(len, PREFIXES)) + sum(len(tail.ids) - 1 for tail in TAILS)]


def test_micro_batches_give_the_step_of_one_batch(model: Any) -> None:
    twin = copy.deepcopy(model)
    for each, steps in ((model, [[collate(TAILS, 0)]]), (twin, [[collate(TAILS[:1], 0), collate(TAILS[1:], 0)]])):
        train(each, torch.optim.SGD(each.parameters(), lr=0.1), steps, schedule=lambda step: 1.0)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), 5))
    assert values.min() > 0.3 and values.max() < 1.5
