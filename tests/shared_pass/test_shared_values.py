"""Whatever the lengths and masks: shared rows have the log-probabilities, entropies and gradients of the padded ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trl.trainer.utils import add_fused_lm_head

from toolgrpo.shared_pass.scoring import SharedPass

pytestmark = pytest.mark.property

VOCABULARY = 31
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWED = {"head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=8)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, **WINDOWED)),
}


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().float()
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    return model.train()


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, attention mask, scored mask: groups of any size, prompts and completions of any length, tool tokens unscored."""
    groups = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=3))
    lengths = [[draw(st.integers(0, 12)) for _ in range(size)] for _, size in groups]
    before, after = max(prompt for prompt, _ in groups), max(1, max(max(own) for own in lengths))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    n_rows = sum(size for _, size in groups)
    ids, mask = torch.zeros((2, n_rows, before + after), dtype=torch.long)
    row = 0
    for (prompt, _), own in zip(groups, lengths, strict=True):
        prompt_ids = torch.randint(0, VOCABULARY, (prompt,), generator=generator)
        for length in own:
            ids[row, before - prompt : before] = prompt_ids
            ids[row, before : before + length] = torch.randint(0, VOCABULARY, (length,), generator=generator)
            mask[row, before - prompt : before + length] = 1
            row += 1
    scored = (torch.rand(mask.shape, generator=generator) < draw(st.sampled_from([0.3, 1.0]))) & mask.bool()
    scored[:, :before] = False
    return ids, mask, scored.long()


def gradient_of(model: Any, logps: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(logps.shape, generator=generator)
    model.zero_grad()
    ((logps + 0.3 * entropies) * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), max_tokens=st.sampled_from([None, 50]))
def test_values_and_gradients_are_the_padded_ones(
    family: str, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], max_tokens: int | None
) -> None:
    model, (ids, mask, scored) = model_of(family), batch
    assume(scored.any())  # a batch with nothing to score has a test of its own
    ours = SharedPass(mode="on", max_tokens=max_tokens).score_tokens(
        model, ids, mask, scored, unwrapped=model, compute_entropy=True
    )
    assert ours is not None and ours.entropies is not None
    assert not ours.logps[:, 0].any(), "nothing predicts the first token"
    logps, entropies = ours.logps[:, 1:], ours.entropies[:, 1:]
    gradient = gradient_of(model, logps, entropies)
    labels = ids.masked_fill(scored == 0, -100)
    padded = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    counts = scored[:, 1:].bool()
    theirs = [torch.where(counts, values, 0.0) for values in (padded.log_probs, padded.entropy)]
    torch.testing.assert_close(logps, theirs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, theirs[1], atol=1e-5, rtol=0)
    expected = gradient_of(model, *theirs)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm() + 1e-7
