"""The products of a training pass: all of them, counted as its shapes say, and computed again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import training_pass
from _pass_products import recorded


def test_layers_forward_and_backward() -> None:
    left, right = torch.randn(3, 5, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    with recorded() as products:
        F.linear(left, right).sum().backward()
    assert len(products) == 3, "the product, and one for each gradient"
    assert products.operations == 3 * 2 * 15 * 7 * 11
    products.compute()


@pytest.mark.parametrize(("causal", "part"), [(False, 1), (True, 0.5)])
def test_attention_forward_and_backward(causal: bool, part: float) -> None:
    heads, tokens, width = 2, 600, 16
    query, key, value = (torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3))
    with recorded() as products:
        F.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()
    assert products.operations == (2 + 5) * 2 * heads * tokens * tokens * width * part
    products.compute()


def test_a_shared_pass_has_fewer_products_than_a_padded_one() -> None:
    case = training_pass.Case(prompt=60, completion=10, group=4, lengths="full", hidden=128, layers=2)
    model, ids, mask = training_pass.build(case)
    shared = training_pass.products_of(case, model, ids, mask)
    with recorded() as padded:
        training_pass.score("trl", case, model, ids, mask).backward()
    assert shared.operations < padded.operations * 0.7, "100 tokens, not 280; the output head is the same"
    shared.compute()
