"""The loss of a batch: cross-entropy on assistant tokens, the vocabulary only computed where it is needed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from toolgrpo.sft.batches import Batch

__all__ = ["batch_loss"]


def batch_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean over the loss tokens of the batch. A shared prefix is computed once; gradients flow through it."""
    targets_mask = batch.loss_mask[:, 1:]
    targets = batch.ids[:, 1:][targets_mask]
    hidden = _hidden_states(model, batch)[targets_mask]
    logits = model.get_output_embeddings()(hidden)
    return F.cross_entropy(logits.float(), targets)


def _hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """The last hidden state before each of `ids[:, 1:]`."""
    inner = model.base_model
    ids, attention_mask = batch.ids[:, :-1], batch.attention_mask[:, :-1]
    if not len(batch.prefix_ids):
        states: torch.Tensor = inner(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return states
    cache = inner(input_ids=batch.prefix_ids, attention_mask=batch.prefix_mask, use_cache=True).past_key_values
    cache.batch_repeat_interleave(batch.per_prefix)
    prefix_mask = batch.prefix_mask.repeat_interleave(batch.per_prefix, dim=0)
    positions = prefix_mask.sum(dim=1, keepdim=True) + torch.arange(ids.shape[1], device=ids.device)
    states = inner(
        input_ids=ids,
        attention_mask=torch.cat([prefix_mask, attention_mask], dim=1),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return states
