"""Attention over a packed prefix tree, as an attention function of transformers.

The function is registered with `transformers.AttentionInterface` under `NAME`; the model is not
touched. The layout of the packed sequence travels as the keyword `prefix_layout` through the
model's forward down to every attention layer, so it is there again when gradient checkpointing runs
a layer a second time. transformers builds no mask for a name that is not in its table of mask
functions, so none is built.

Which attention runs is decided by the model's config, which generation reads too. So
`shared_attention(config)` switches it for the forward pass only, and `keep_for_backward` switches it
again while the backward pass of that forward runs.

Exact: every token sees precisely the tokens it would see in its padded row. On the CPU
`tree_attention` computes each pair once; elsewhere, and where a sliding window cuts rows, segments
of like size are computed in one SDPA call (`attention.py`).

Not covered: attention sinks, soft-capped scores, biases; models that have them are refused in
`scoring.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from toolgrpo.errors import ModelError
from toolgrpo.shared_pass.packing import PackedSegment
from toolgrpo.shared_pass.torch_seam import (
    after_backward_pass,
    attention_name,
    cpu_attention_backward,
    cpu_attention_forward,
    set_attention_name,
)

NAME = "toolgrpo_prefix_shared"


# Segments of like size, attended to in one call: what accelerators are quick in.
#
# A segment is either the end of a causal row, for which its ancestors' queries are computed again and
# dropped, and padding on the right needs no mask; or, where the ancestors are much longer, its own
# queries under a mask. Windows that cut a row are always masked, in blocks of queries as long as the window.
#
# Invariants: every place of the packed sequence is the answer of exactly one query; no mask has more
# than `MOST_MASKED` elements, unless one query sees more keys than that.

_AGAIN = 4  # times its own length that a segment's row may have for its ancestors to be computed again
MOST_MASKED = 2**26  # of one call; the kernels make 16 or 32 bits of each


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are attended to together; padding stands on the right."""

    n_rows: int
    n_queries: int  # of each row
    n_keys: int
    mask: torch.Tensor | None  # (B, 1, Q, K) bool; None: causal, queries and keys are the same


@dataclass(frozen=True, slots=True)
class SegmentBatches:
    """All segments of a packed sequence. Places are gathered at once: on a GPU each step costs its launch."""

    batches: tuple[_Batch, ...]
    queries: torch.Tensor  # places in the packed sequence, row after row, batch after batch
    keys: torch.Tensor
    order: torch.Tensor  # (n_tokens,) which of the queries answers for each place


@dataclass(frozen=True, slots=True)
class _Row:
    places: torch.Tensor  # what the queries see; they themselves at the end
    n_own: int  # queries whose answers are wanted, the last ones
    n_queries: int


def batches_of(segments: Sequence[PackedSegment], window: int | None, device: torch.device) -> SegmentBatches:
    """Sort segments into batches by the sizes of their queries and keys, each within a factor of two."""
    sorted_in: dict[tuple[bool, int, int], list[_Row]] = {}
    for segment in segments:
        for masked, row in _rows_of(segment, window):
            key = (masked, row.n_queries.bit_length(), len(row.places).bit_length())
            sorted_in.setdefault(key, []).append(row)
    batches = []
    for (masked, query_bits, key_bits), rows in sorted_in.items():
        at_a_time = max(1, MOST_MASKED >> (query_bits + key_bits)) if masked else len(rows)
        batches += [(masked, rows[start : start + at_a_time]) for start in range(0, len(rows), at_a_time)]
    made, places = [], [_places(rows) for _, rows in batches]
    for (masked, rows), (row_queries, _, row_keys) in zip(batches, places, strict=True):
        sizes = (row_queries.shape[1], row_keys.shape[1])
        made.append(_Batch(len(rows), *sizes, _visible(rows, *sizes, window, device) if masked else None))
    queries, wanted, keys = (torch.cat([one.flatten() for one in parts]) for parts in zip(*places, strict=True))
    answers = wanted.nonzero()[:, 0]
    order = answers[queries[answers].argsort()]
    return SegmentBatches(tuple(made), queries.to(device), keys.to(device), order.to(device))


def _rows_of(segment: PackedSegment, window: int | None) -> Iterator[tuple[bool, _Row]]:
    """Yield the rows of a segment, and whether each needs a mask."""
    spans = (*segment.ancestors, (segment.start, segment.end))
    places = torch.cat([torch.arange(start, end) for start, end in spans])
    n_places = len(places)
    seen = n_places if window is None else min(window, n_places)  # by one query
    if seen == n_places <= _AGAIN * segment.length:
        yield False, _Row(places, segment.length, n_places)
        return
    block = max(1, min(seen, MOST_MASKED // (2 * seen)))
    for start in range(n_places - segment.length, n_places, block):
        end = min(start + block, n_places)
        yield True, _Row(places[max(0, start - seen + 1) : end], end - start, end - start)


def _places(rows: Sequence[_Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the places of the queries (B, Q), which of them are wanted, and those of the keys (B, K)."""
    n_queries, n_keys = max(row.n_queries for row in rows), max(len(row.places) for row in rows)
    queries, keys = (torch.zeros(len(rows), n, dtype=torch.long) for n in (n_queries, n_keys))
    wanted = torch.zeros(len(rows), n_queries, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.places)
        keys[index, :length] = row.places
        queries[index, : row.n_queries] = row.places[length - row.n_queries :]
        wanted[index, row.n_queries - row.n_own : row.n_queries] = True
    return queries, wanted, keys


def _visible(
    rows: Sequence[_Row], n_queries: int, n_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which keys each query sees. It is made on the device: a host takes longer for it than a GPU for the pass."""
    counts, lengths = torch.tensor([(row.n_queries, len(row.places)) for row in rows], device=device).T[..., None]
    number, seen = torch.arange(n_queries, device=device), torch.arange(n_keys, device=device)
    own = torch.where(number < counts, number + lengths - counts, 0)[:, None, :, None]  # padding sees the first key
    visible = seen <= own
    return visible if window is None else visible & (seen > own - window)


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
    device = query.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    grouped = flash_takes_groups(capability, dtype, query.shape[-1])
    sizes = [batch.n_rows * batch.n_queries for batch in batches.batches]
    all_queries = torch.split(_gathered(query[0], batches.queries), sizes, 1)
    sizes = [batch.n_rows * batch.n_keys for batch in batches.batches]
    all_keys, all_values = (torch.split(_gathered(states[0], batches.keys), sizes, 1) for states in (key, value))
    answers = []
    for batch, *states in zip(batches.batches, all_queries, all_keys, all_values, strict=True):
        queries, keys, values = (torch.unflatten(one, 1, (batch.n_rows, -1)).transpose(0, 1) for one in states)
        in_groups = groups > 1 and grouped and batch.mask is None
        if groups > 1 and not in_groups:
            keys, values = (one.repeat_interleave(groups, 1) for one in (keys, values))
        answer = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=batch.mask,
            is_causal=batch.mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=in_groups,
        )
        answers.append(answer.transpose(1, 2).flatten(0, 1))
    return torch.cat(answers).index_select(0, batches.order)[None]


def flash_takes_groups(capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the flash kernel runs without a mask: it alone computes several queries for one key
    without all the scores in memory. `capability` is that of a CUDA device.
    """
    in_half = dtype in (torch.float16, torch.bfloat16)
    return capability is not None and capability >= (8, 0) and in_half and head_dim <= 256


def _gathered(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the states (heads, n_tokens, head_dim) at these places, (heads, N, head_dim)."""
    gathered: torch.Tensor = _Gathered.apply(states, places)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    """Indexing, whose own backward pass sorts the places at each call; that of `index_select` would sum the
    gradients of a place in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.n_tokens = states.shape[1]
        return states.index_select(1, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,), (grad,) = ctx.saved_tensors, grads
        exact = _summed_in(grad.dtype)
        total = torch.zeros(grad.shape[0], ctx.n_tokens, grad.shape[2], dtype=exact, device=grad.device)
        return total.index_add_(1, places, grad.to(exact)).to(grad.dtype), None


# Exact attention over a packed prefix tree on the CPU, every pair of tokens computed once.
#
# The tree is cut into tiles without a mask. Each segment sees itself: a causal square. All that lies
# below a segment sees it whole: one rectangle, however many rows that is. A query's partial outputs
# are joined by their log-sum-exps; backward, each tile needs the joined output and log-sum-exp only,
# and gives its share of the gradients.
#
# It calls the kernels behind PyTorch's own CPU attention (`torch_seam.py`).
#
# Not covered: masks, windows that cut a row, dropout, mixed dtypes and other devices; `fits` says so,
# and `attention.py` has another way for these.


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of the packed sequence that see each other.

    `causal` where they are the same tokens.
    """

    queries: slice
    keys: slice
    causal: bool


def tiles_of(segments: Sequence[PackedSegment]) -> tuple[Tile, ...]:
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


class PrefixLayout:
    """The segments of one packed sequence,
    and the batches their attention is computed in (built once, used by every layer).
    """

    def __init__(self, segments: tuple[PackedSegment, ...]) -> None:
        self.segments = segments
        self.tiles = tiles_of(segments)
        self.longest_row = max(segment.position + segment.length for segment in segments)
        self._batches: dict[tuple[int | None, torch.device], SegmentBatches] = {}

    def batches(self, window: int | None, device: torch.device) -> SegmentBatches:
        """Return the segments in batches, for queries that see `window` tokens back."""
        key = (window, device)
        if key not in self._batches:
            self._batches[key] = batches_of(self.segments, window, device)
        return self._batches[key]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, heads, n_tokens, head_dim)
    key: torch.Tensor,  # (1, key_value_heads, n_tokens, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    prefix_layout: PrefixLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in the packed sequence; transformers calls this in every layer."""
    if prefix_layout is None:
        raise ModelError(
            f"{type(module).__name__} did not hand `prefix_layout` down to its attention, so prompts cannot be shared "
            f"in this model; set prefix_sharing to off."
        )
    in_window = sliding_window is None or prefix_layout.longest_row <= sliding_window
    if in_window and query.device.type == "cpu":
        groups = query.shape[1] // key.shape[1]
        own, *others = _of_one_type(query, key, value)
        whole_key, whole_value = (states.repeat_interleave(groups, 1) for states in others)
        if fits(own, whole_key, whole_value, dropout):
            tree = tree_attention(own, whole_key, whole_value, prefix_layout.tiles, scaling)
            return tree.transpose(1, 2).contiguous(), None
    batches = prefix_layout.batches(None if in_window else sliding_window, query.device)
    return attend_in_batches(query, key, value, batches, scaling, dropout), None


def _of_one_type(*states: torch.Tensor) -> list[torch.Tensor]:
    """Return them in the widest number type among them: under autocast, queries and keys come out of the
    rotation in another one than values.
    """
    widest = functools.reduce(torch.promote_types, (one.dtype for one in states))
    return [one.to(widest) for one in states]


AttentionInterface.register(NAME, _attend)


@contextmanager
def shared_attention(config: Any) -> Iterator[None]:
    """Let the model of this config attend over packed prefix trees in this block.

    Afterwards it attends as before, always.
    """
    before = attention_name(config)
    set_attention_name(config, NAME)
    try:
        yield
    finally:
        set_attention_name(config, before)


def keep_for_backward(config: Any, output: torch.Tensor) -> None:
    """Let the layers that gradient checkpointing computes again,
    in the backward pass of `output`, find our attention.
    """

    def switch(grad: torch.Tensor) -> torch.Tensor:
        before = attention_name(config)
        if before != NAME:
            set_attention_name(config, NAME)
            after_backward_pass(lambda: set_attention_name(config, before))
        return grad

    output.register_hook(switch)  # type: ignore[no-untyped-call]  # untyped in torch
