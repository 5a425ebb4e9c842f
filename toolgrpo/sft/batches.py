"""Conversations as tokens, and batches of them.

Invariant: `len(ids) == len(mask)`; the mask is 1 exactly on the tokens a loss is taken on: those of assistant turns, their
end-of-turn token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

__all__ = ["Batch", "Example", "collate"]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask):
            raise ValueError(
                f"an example's ids and mask must have one length; got {len(self.ids)} and {len(self.mask)}"
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded."""

    ids: torch.Tensor  # [B, L]
    attention_mask: torch.Tensor  # [B, L] 1 where there is a token
    loss_mask: torch.Tensor  # [B, L] bool; the first token has no loss, nothing predicts it

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, each.name).to(device) for each in fields(self)))

    @property
    def n_targets(self) -> int:
        """How many tokens the loss is taken on."""
        return int(self.loss_mask.sum())


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), pad_id)
    attention_mask, loss_mask = torch.zeros((2, len(examples), width), dtype=torch.long)
    for index, example in enumerate(examples):
        n = len(example.ids)
        ids[index, :n] = torch.tensor(example.ids)
        attention_mask[index, :n] = 1
        loss_mask[index, 1:n] = torch.tensor(example.mask[1:])
    return Batch(ids, attention_mask, loss_mask.bool())
