"""Choose the samples of a generation batch for one micro-batch:
those of one group, where the sizes allow.

TRL shuffles the samples of a generation batch and cuts it into micro-batches,
`gradient_accumulation_steps` of which make one optimizer step. `put_in_order` moves samples
between micro-batches of one and the same optimizer step only, so every optimizer step still takes
exactly the samples that TRL's shuffle gave it. Samples that are trained at all come first: where they
fill the first micro-batches of every process, no process waits with an empty one for a full one of
another.

Not covered: losses that TRL normalises per micro-batch (`bnpo`, and the entropy bonus) depend on
which samples stand together, under TRL's shuffle as under this order. The others sum to the same
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

MicroBatch = dict[str, Any]
"""What TRL's `split_tensor_dict` gives:
tensors and lists with a first dimension of samples, scalars, None.
"""


IsLive = Callable[[MicroBatch], Sequence[bool]]
"""Says of each sample whether it is trained at all."""


def put_in_order(
    micro_batches: Sequence[MicroBatch],
    accumulation_steps: int,
    is_live: IsLive | None = None,
    *,
    by_prompt: bool = True,
) -> list[MicroBatch]:
    """Bring the samples of one prompt into one micro-batch of their optimizer step, if they fit.

    Groups with a live sample come first, if it is said which are live. Without `by_prompt` each sample is
    a group of its own.
    """
    # a generation batch may end in the middle of an optimizer step, and samples never cross one
    n_together = math.gcd(len(micro_batches), accumulation_steps)
    ordered = []
    for start in range(0, len(micro_batches), n_together):
        block = micro_batches[start : start + n_together]
        live = None if is_live is None else [live for micro_batch in block for live in is_live(micro_batch)]
        ordered.extend(_reorder(block, live, by_prompt))
    return ordered


def order_by_group(groups: Sequence[Hashable], micro_batch_size: int, live: Sequence[bool] | None = None) -> list[int]:
    """Return an order of the samples that keeps groups whole in micro-batches of this size.

    It splits as few groups as a greedy filling can, and fills in groups with a live sample first.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)

    def urgency(rows: list[int]) -> tuple[bool, int]:
        return live is None or any(live[row] for row in rows), len(rows)

    bins: list[list[int]] = [[] for _ in range(len(groups) // micro_batch_size)]
    leftover: list[int] = []
    for rows in sorted(members.values(), key=urgency, reverse=True):
        rest = rows
        while rest:
            piece, rest = rest[:micro_batch_size], rest[micro_batch_size:]
            room = [box for box in bins if micro_batch_size - len(box) >= len(piece)]
            if room:
                # the fullest that has room: emptier ones stay for groups that are larger
                max(room, key=len).extend(piece)
            else:
                leftover.extend(piece)
    for box in bins:
        n_missing = micro_batch_size - len(box)
        box.extend(leftover[:n_missing])
        leftover = leftover[n_missing:]
    return [index for box in bins for index in box]


def _reorder(block: Sequence[MicroBatch], live: Sequence[bool] | None, by_prompt: bool) -> list[MicroBatch]:
    sizes = [len(micro_batch["prompt_ids"]) for micro_batch in block]
    if len(block) == 1 or len(set(sizes)) > 1:
        return list(block)
    order = order_by_group(_prompts(block) if by_prompt else range(sum(sizes)), sizes[0], live)
    joined = {key: _permuted([micro_batch[key] for micro_batch in block], order) for key in block[0]}
    return [
        {key: value[start : start + sizes[0]] if _per_sample(value) else value for key, value in joined.items()}
        for start in range(0, sum(sizes), sizes[0])
    ]


def _prompts(block: Sequence[MicroBatch]) -> list[Hashable]:
    ids = torch.cat([micro_batch["prompt_ids"] for micro_batch in block])
    mask = torch.cat([micro_batch["prompt_mask"] for micro_batch in block]).bool()
    return [row[real].numpy().tobytes() for row, real in zip(ids.cpu(), mask.cpu(), strict=True)]


def _per_sample(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _permuted(parts: list[Any], order: list[int]) -> Any:
    if not _per_sample(parts[0]):
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)[torch.tensor(order, device=parts[0].device)]
    samples = [sample for part in parts for sample in part]
    return [samples[index] for index in order]
