"""Conversations as tokens, and batches of them.

Invariants:

* `len(ids) == len(mask)`; the mask is 1 exactly on the tokens a loss is taken on: those of assistant turns, their
  end-of-turn token included.
* A batch may hold a shared prefix: `per_prefix` consecutive examples go on from one prefix, which is computed once. Prefix
  tokens carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

__all__ = ["Batch", "Example", "collate"]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation, or what follows a shared prefix of one."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask):
            raise ValueError(
                f"an example's ids and mask must have one length; got {len(self.ids)} and {len(self.mask)}"
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded. `prefix_ids` is empty (0 columns) without shared prefixes."""

    prefix_ids: torch.Tensor  # [P, Lp]
    prefix_mask: torch.Tensor  # [P, Lp] 1 where there is a token
    ids: torch.Tensor  # [P * per_prefix, L]
    attention_mask: torch.Tensor  # [P * per_prefix, L] 1 where there is a token
    loss_mask: torch.Tensor  # [P * per_prefix, L] bool

    @property
    def per_prefix(self) -> int:
        return len(self.ids) // max(1, len(self.prefix_ids))

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, each.name).to(device) for each in fields(self)))

    @property
    def n_targets(self) -> int:
        """How many tokens the loss is taken on."""
        return int(self.loss_mask[:, 1:].sum())


def collate(examples: Sequence[Example], pad_id: int, prefixes: Sequence[Sequence[int]] = ()) -> Batch:
    """One batch; with prefixes, the examples of each stand together and are equally many."""
    if prefixes and len(examples) % len(prefixes):
        raise ValueError(f"{len(examples)} examples cannot be shared out evenly over {len(prefixes)} prefixes")
    prefix_ids, prefix_mask = _padded(prefixes, pad_id)
    ids, attention_mask = _padded([example.ids for example in examples], pad_id)
    loss_mask, _ = _padded([example.mask for example in examples], 0)
    return Batch(prefix_ids, prefix_mask, ids, attention_mask, loss_mask.bool())


def _padded(rows: Sequence[Sequence[int]], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), width), value)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return padded, mask
