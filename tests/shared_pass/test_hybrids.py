"""Recurrent layers over prefix trees: deep trees, segments of one token, checkpointing, and what is private in Transformers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.shared_pass.test_prefix_sharing import (
    COLUMNS,
    VOCABULARY,
    assert_equal,
    batch,
    cached,
    make,
    padded,
    shared,
)
from toolgrpo.errors import ModelError
from toolgrpo.shared_pass import recurrent_seam
from toolgrpo.shared_pass.packing import pack, rows_of_batch
from toolgrpo.shared_pass.recurrent_seam import RecurrentLayout, module_of, share_recurrences
from toolgrpo.shared_pass.scoring import SharedPass, forward_packing

HYBRIDS = ("qwen3_5", "lfm2", "nemotron_h")  # one for each kind of recurrence


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_deep_tree_whose_segments_have_one_token_or_some(family: str) -> None:
    """Branches at 1, 2, 3 and 40 tokens: segments shorter than the convolution that follows them."""
    model = cached(family)
    generator = torch.Generator().manual_seed(3)
    trunk = torch.randint(0, VOCABULARY, (40,), generator=generator)
    rows = [torch.cat([trunk[:n], torch.randint(0, VOCABULARY, (12,), generator=generator)]) for n in (1, 2, 3, 40, 40)]
    rows.append(trunk[:4])
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    last = torch.zeros_like(mask)
    last[:, -1] = 1
    packing = pack(rows_of_batch(ids, mask, last), min_shared=1)
    assert {1, 12 - 1} <= {segment.length for segment in packing.segments}
    assert max(len(segment.ancestors) for segment in packing.segments) >= 3

    def gradient(logps: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        logps.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    tree, _ = forward_packing(model, model.config, packing, ids.device)
    ours = gradient(tree)
    labels = ids.masked_fill(last == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(tree.detach(), output.log_probs[packing.rows, -1].detach(), atol=1e-5, rtol=0)
    theirs = gradient(output.log_probs[:, -1])
    assert theirs.norm() > 0.1
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", HYBRIDS)
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    model, rows = make(family), batch([31, 23], 2)
    expected = padded(model, rows)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    assert_equal(shared(model, rows), expected)
    assert len(calls) == 2, "the layer was not computed again in the backward pass"


def test_a_layer_that_computes_without_the_tree_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = cached("qwen3_5"), batch([31], 2)
    shared(model, rows)  # replaces the functions for good
    module = module_of("qwen3_5_text")
    monkeypatch.setattr(module, "causal_conv1d_fn", module.causal_conv1d_fn.__wrapped__)
    with pytest.raises(ModelError, match=r"0 of 2 recurrent layers of qwen3_5_text .*`causal_conv1d_fn`; set prefix_s"):
        SharedPass(mode="on").score_completions(model, rows.ids, rows.mask, COLUMNS, unwrapped=model)


@pytest.mark.contract
@pytest.mark.parametrize("family", recurrent_seam._FUNCTIONS)
def test_the_functions_of_transformers_take_what_the_seam_gives_them(family: str) -> None:
    share_recurrences(family)
    taken = {
        "causal_conv1d_fn": {"hidden_states", "weight", "bias", "activation"},
        "torch_chunk_gated_delta_rule": {"g", "beta", "initial_state", "output_final_state"},
        "mamba2_chunk_scan": {
            *("hidden_states", "dt", "A", "B", "C", "chunk_size", "initial_states", "return_final_states"),
            *("dt_bias", "dt_softplus", "dt_limit"),
        },
        "mamba2_split_conv1d_scan_combined": {"zxbcdt"},
    }
    for name in recurrent_seam._FUNCTIONS[family]:
        original = inspect.unwrap(getattr(module_of(family), name))
        assert taken[name] <= set(inspect.signature(original).parameters), (
            f"{name} of {module_of(family).__name__} takes other arguments: follow it in shared_pass/recurrent_seam.py"
        )
        used = inspect.getsource(module_of(family))
        assert used.count(f"{name}(") > 1, f"no layer of {family} calls {name} any more"


def test_a_kernel_for_a_whole_layer_is_passed_by_where_there_is_a_tree() -> None:
    def kernel(*args: Any, **kwargs: Any) -> str:
        return "computed"

    guarded = recurrent_seam._whole_layer(kernel)
    assert guarded(1, seq_idx=None) == "computed"
    assert guarded(1, seq_idx=RecurrentLayout([])) is None
