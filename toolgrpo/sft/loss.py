"""The loss of a batch: cross-entropy on assistant tokens, a common beginning of conversations computed once.

It runs on the same prefix-shared pass as reinforcement learning (`toolgrpo.shared_pass.scoring`), which is made for
this too: many demonstrations under one system prompt. Where that pass steps aside, the padded one runs.
"""

from __future__ import annotations

from typing import Any

import torch

from toolgrpo.sft.batches import Batch
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.trainer.trl_seam import add_fused_head

__all__ = ["SupervisedLoss"]


class SupervisedLoss:
    """Called with a batch, it gives the mean loss over the loss tokens of the batch. It adds TRL's fused head to the model."""

    def __init__(self, model: Any) -> None:
        add_fused_head(model)
        self._model = model
        self._shared = SharedPass()

    def __call__(self, batch: Batch) -> torch.Tensor:
        scored = self._shared.score_tokens(
            self._model, batch.ids, batch.attention_mask, batch.loss_mask, unwrapped=self._model
        )
        if scored is not None:
            return -scored.logps.sum() / batch.n_targets
        output = self._model(
            input_ids=batch.ids,
            attention_mask=batch.attention_mask,
            labels=batch.ids.masked_fill(~batch.loss_mask, -100),
            fused_lm_head=True,
        )
        loss: torch.Tensor = -output.log_probs.sum() / batch.n_targets
        return loss
