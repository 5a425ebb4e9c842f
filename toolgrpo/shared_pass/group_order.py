"""Which samples of a generation batch go into one micro-batch:
those of one group, where the sizes allow.

TRL shuffles the samples of a generation batch and cuts it into micro-batches,
`gradient_accumulation_steps` of which make one optimizer step. `keep_groups_together` moves samples
between micro-batches of one and the same optimizer step only, so every optimizer step still takes
exactly the samples that TRL's shuffle gave it.

Not covered: losses that TRL normalises per micro-batch (`bnpo`, and the entropy bonus) depend on
which samples stand together, under TRL's shuffle as under this order. The others sum to the same
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

__all__ = ["keep_groups_together", "order_by_group"]

MicroBatch = dict[str, Any]
"""What TRL's `split_tensor_dict` gives:
tensors and lists with a first dimension of samples, scalars, None.
"""


def keep_groups_together(micro_batches: Sequence[MicroBatch], accumulation_steps: int) -> list[MicroBatch]:
    """Bring the samples of one prompt into one micro-batch of their optimizer step, if they fit."""
    n_together = math.gcd(len(micro_batches), accumulation_steps)
    ordered = []
    for start in range(0, len(micro_batches), n_together):
        ordered.extend(_reorder(micro_batches[start : start + n_together]))
    return ordered


def order_by_group(groups: Sequence[Hashable], micro_batch_size: int) -> list[int]:
    """Return an order of the samples that keeps groups whole in micro-batches of this size.

    It splits as few groups as a greedy filling can.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    bins: list[list[int]] = [[] for _ in range(len(groups) // micro_batch_size)]
    leftover: list[int] = []
    for rows in sorted(members.values(), key=len, reverse=True):
        rest = rows
        while rest:
            piece, rest = rest[:micro_batch_size], rest[micro_batch_size:]
            room = [box for box in bins if micro_batch_size - len(box) >= len(piece)]
            if room:
                max(room, key=len).extend(piece)
            else:
                leftover.extend(piece)
    for box in bins:
        n_missing = micro_batch_size - len(box)
        box.extend(leftover[:n_missing])
        leftover = leftover[n_missing:]
    return [index for box in bins for index in box]


def _reorder(block: Sequence[MicroBatch]) -> list[MicroBatch]:
    sizes = [len(micro_batch["prompt_ids"]) for micro_batch in block]
    if len(block) == 1 or len(set(sizes)) > 1:
        return list(block)
    ids = torch.cat([micro_batch["prompt_ids"] for micro_batch in block])
    mask = torch.cat([micro_batch["prompt_mask"] for micro_batch in block]).bool()
    groups = [row[real].numpy().tobytes() for row, real in zip(ids.cpu(), mask.cpu(), strict=True)]
    order = order_by_group(groups, sizes[0])
    joined = {key: _permuted([micro_batch[key] for micro_batch in block], order) for key in block[0]}
    return [
        {key: _piece(value, start, sizes[0]) for key, value in joined.items()}
        for start in range(0, sum(sizes), sizes[0])
    ]


def _per_sample(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _permuted(parts: list[Any], order: list[int]) -> Any:
    if not _per_sample(parts[0]):
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)[torch.tensor(order, device=parts[0].device)]
    samples = [sample for part in parts for sample in part]
    return [samples[index] for index in order]


def _piece(value: Any, start: int, size: int) -> Any:
    return value[start : start + size] if _per_sample(value) else value
