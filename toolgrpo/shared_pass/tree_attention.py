"""Exact attention over a packed prefix tree on the CPU, every pair of tokens computed once.

The tree is cut into tiles without a mask. Each segment sees itself: a causal square. All that lies
below a segment sees it whole: one rectangle, however many rows that is. A query's partial outputs
are joined by their log-sum-exps; backward, each tile needs the joined output and log-sum-exp only,
and gives its share of the gradients.

It calls the kernels behind PyTorch's own CPU attention (`torch_seam.py`).

Not covered: masks, windows that cut a row, dropout, mixed dtypes and other devices; `fits` says so,
and `attention.py` has another way for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolgrpo.shared_pass.packing import Segment
from toolgrpo.shared_pass.torch_seam import cpu_attention_backward, cpu_attention_forward


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of the packed sequence that see each other.

    `causal` where they are the same tokens.
    """

    queries: slice
    keys: slice
    causal: bool


def tiles_of(segments: Sequence[Segment]) -> tuple[Tile, ...]:
    """Return the squares in packed order, then the rectangles.

    What is below a segment follows it without a gap.
    """
    below: dict[tuple[int, int], int] = {}
    for segment in segments:
        for ancestor in segment.ancestors:
            below[ancestor] = max(segment.end, below.get(ancestor, 0))
    squares = [Tile(slice(s.start, s.end), slice(s.start, s.end), True) for s in segments]
    rectangles = [Tile(slice(end, last), slice(start, end), False) for (start, end), last in below.items()]
    return (*squares, *rectangles)


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether the kernels take these."""
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape == key.shape == value.shape
        and dropout == 0.0
    )


def tree_attention(
    query: torch.Tensor,  # (1, heads, n_tokens, head_dim), as are the others
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: Sequence[Tile],
    scale: float | None,
) -> torch.Tensor:
    """Let each token attend to what it sees of its row, in the packed order."""
    result: torch.Tensor = _TreeAttention.apply(query, key, value, tiles, scale)  # type: ignore[no-untyped-call]
    return result


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: Sequence[Tile],
        scale: float | None,
    ) -> torch.Tensor:
        exact = _summed_in(query.dtype)
        output = torch.empty(query.shape, dtype=exact)
        total = torch.empty(query.shape[:3], dtype=exact)
        for tile in tiles:
            rows = tile.queries
            part, log_sum = cpu_attention_forward(
                query[:, :, rows], key[:, :, tile.keys], value[:, :, tile.keys], 0.0, tile.causal, scale=scale
            )
            if not tile.causal:
                before = total[:, :, rows]
                joined = torch.logaddexp(before, log_sum)
                old = output[:, :, rows] * (before - joined).exp().unsqueeze(-1)
                part = old + part * (log_sum - joined).exp().unsqueeze(-1)
                log_sum = joined
            output[:, :, rows], total[:, :, rows] = part, log_sum
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.tiles, ctx.scale = tiles, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros(query.shape, dtype=total.dtype) for _ in range(3))
        for tile in ctx.tiles:
            rows, seen = tile.queries, tile.keys
            parts = cpu_attention_backward(
                grads[0][:, :, rows],
                query[:, :, rows],
                key[:, :, seen],
                value[:, :, seen],
                output[:, :, rows],
                total[:, :, rows],
                0.0,
                tile.causal,
                scale=ctx.scale,
            )
            grad_query[:, :, rows] += parts[0]
            grad_key[:, :, seen] += parts[1]
            grad_value[:, :, seen] += parts[2]
        return *(grad.to(query.dtype) for grad in (grad_query, grad_key, grad_value)), None, None


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts are joined: numbers of 16 bits would be rounded with every one."""
    return torch.float64 if dtype == torch.float64 else torch.float32
