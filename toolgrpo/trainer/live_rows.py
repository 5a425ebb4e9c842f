"""The training pass over live rows only: those that have an advantage on a token that is trained.

What a dead row adds to the loss is 0 times a function of its log-probabilities. So its pass is left
out and a number stands in for each of them; the loss itself sees the whole batch, and all its
denominators are those of the full pass, whichever they are.

Every process makes the same number of forward and backward calls, as DDP, FSDP and ZeRO need: a
process without a live row reads two tokens, of which one is scored, with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities and entropies, both (B, T), and a loss of the model's own."""


@dataclass(frozen=True)
class RowChoice:
    """Rows of a micro-batch to score, and the stand-ins for the others."""

    live: torch.Tensor  # (B,)
    stand_in: torch.Tensor | float  # log-probabilities (B, T), or one for all

    def score(
        self,
        score: Callable[..., Scores],
        input_ids: torch.Tensor,  # (B, P + T)
        attention_mask: torch.Tensor,  # (B, P + T)
        logits_to_keep: int,  # T
        **kwargs: Any,
    ) -> Scores:
        """Score the live rows; the results have the places that a pass over all rows gives them.

        A batch that holds more than text is scored whole.
        """
        rows = self.live.nonzero()[:, 0]
        only_text = not any(isinstance(value, torch.Tensor | list) for value in kwargs.values())
        if len(rows) == len(self.live) or not only_text:
            return score(input_ids, attention_mask, logits_to_keep, **kwargs)
        if len(rows) == 0:
            end = input_ids.shape[1] - logits_to_keep + 1  # of the prompt's last token and the one after it
            two = input_ids[:1, end - 2 : end]
            logps, entropies, _ = score(two, torch.ones_like(two), 1, **kwargs)
            logps, entropies = 0 * logps, None if entropies is None else 0 * entropies
            whole = self._dead_logps(logps, logits_to_keep) + logps
            return whole, None if entropies is None else entropies.expand_as(whole), None
        logps, entropies, _ = score(input_ids[rows], attention_mask[rows], logits_to_keep, **kwargs)
        whole = self._dead_logps(logps, logits_to_keep).index_put((rows,), logps)
        if entropies is None:
            return whole, None, None
        return whole, torch.zeros_like(whole, dtype=entropies.dtype).index_put((rows,), entropies), None

    def _dead_logps(self, like: torch.Tensor, width: int) -> torch.Tensor:
        if isinstance(self.stand_in, torch.Tensor):
            return self.stand_in.to(like.dtype)
        return like.new_full((len(self.live), width), self.stand_in)
