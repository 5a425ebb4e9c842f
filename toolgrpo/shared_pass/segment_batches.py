"""Segments of like size, attended to in one call: what accelerators are quick in.

A segment is either the end of a causal row, for which its ancestors' queries are computed again and
dropped, and padding on the right needs no mask; or, where the ancestors are much longer, its own
queries under a mask. Windows that cut a row are always masked.

Invariant: every place of the packed sequence is the answer of exactly one query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from toolgrpo.shared_pass.packing import Segment

_AGAIN = 4  # times its own length that a segment's row may have for its ancestors to be computed again


@dataclass(frozen=True, slots=True)
class _Batch:
    """Segments that are attended to together; padding stands on the right."""

    queries: torch.Tensor  # (B, Q) places in the packed sequence
    keys: torch.Tensor  # (B, K)
    mask: torch.Tensor | None  # (B, 1, Q, K) bool; None: causal, queries and keys are the same
    wanted: torch.Tensor  # of the B * Q answers, those of the segments' own tokens


@dataclass(frozen=True, slots=True)
class SegmentBatches:
    """All segments of a packed sequence."""

    batches: tuple[_Batch, ...]
    order: torch.Tensor  # (n_tokens,) where among the wanted answers each place's is


@dataclass(frozen=True, slots=True)
class _Row:
    places: torch.Tensor  # what one segment's tokens see, and they themselves at the end
    n_own: int
    n_queries: int
    first: int  # position of the first key that anybody here sees


def batches_of(segments: Sequence[Segment], window: int | None, device: torch.device) -> SegmentBatches:
    """Sort segments into batches by the sizes of their queries and keys, each within a factor of two."""
    sorted_in: dict[tuple[bool, int, int], list[_Row]] = {}
    for segment in segments:
        spans = (*segment.ancestors, (segment.start, segment.end))
        places = torch.cat([torch.arange(start, end) for start, end in spans])
        cut = window is not None and len(places) > window
        masked = cut or len(places) > _AGAIN * segment.length
        first = max(0, segment.position - window + 1) if cut and window is not None else 0
        n_queries = segment.length if masked else len(places)
        key = (masked, n_queries.bit_length(), (len(places) - first).bit_length())
        sorted_in.setdefault(key, []).append(_Row(places[first:], segment.length, n_queries, first))
    batches = tuple(_batch(rows, masked, window, device) for (masked, _, _), rows in sorted_in.items())
    answered = torch.cat([batch.queries.flatten()[batch.wanted] for batch in batches])
    return SegmentBatches(batches, answered.argsort())


def _batch(rows: Sequence[_Row], masked: bool, window: int | None, device: torch.device) -> _Batch:
    n_queries, n_keys = max(row.n_queries for row in rows), max(len(row.places) for row in rows)
    queries, keys = (
        torch.zeros(len(rows), n_queries, dtype=torch.long),
        torch.zeros(len(rows), n_keys, dtype=torch.long),
    )
    wanted = torch.zeros(len(rows), n_queries, dtype=torch.bool)
    visible = torch.zeros(len(rows), 1, n_queries, n_keys, dtype=torch.bool) if masked else None
    for index, row in enumerate(rows):
        length = len(row.places)
        keys[index, :length] = row.places
        queries[index, : row.n_queries] = row.places[length - row.n_queries :]
        wanted[index, row.n_queries - row.n_own : row.n_queries] = True
        if visible is not None:
            behind = torch.arange(length - row.n_queries, length)[:, None] - torch.arange(length)
            visible[index, 0, : row.n_queries, :length] = (behind >= 0) & (behind < (window or length))
            visible[index, 0, row.n_queries :, 0] = True  # padding sees something, so that it is a number
    return _Batch(
        queries.to(device),
        keys.to(device),
        None if visible is None else visible.to(device),
        wanted.flatten().nonzero()[:, 0].to(device),
    )


def attend_in_batches(
    query: torch.Tensor,  # (1, heads, n_tokens, head_dim)
    key: torch.Tensor,  # (1, key_value_heads, n_tokens, head_dim)
    value: torch.Tensor,
    batches: SegmentBatches,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Return (1, n_tokens, heads, head_dim): each token attends to what it sees of its row."""
    groups = query.shape[1] // key.shape[1]
    answers = []
    for batch in batches.batches:
        queries = query[0][:, batch.queries].transpose(0, 1)
        keys, values = (states[0][:, batch.keys].transpose(0, 1) for states in (key, value))
        if batch.mask is not None and groups > 1:  # the kernels that take a mask want as many keys as queries
            keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        answer = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=batch.mask,
            is_causal=batch.mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=batch.mask is None and groups > 1,
        )
        answers.append(answer.transpose(1, 2).flatten(0, 1)[batch.wanted])
    return torch.cat(answers)[batches.order][None]
