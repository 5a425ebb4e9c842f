"""Attention over a packed prefix tree, as an attention function of transformers.

The function is registered with `transformers.AttentionInterface` under `NAME`; the model is not
touched. The layout of the packed sequence travels as the keyword `prefix_layout` through the
model's forward down to every attention layer, so it is there again when gradient checkpointing runs
a layer a second time. transformers builds no mask for a name that is not in its table of mask
functions, so none is built.

Which attention runs is decided by the model's config, which generation reads too. So
`shared_attention(config)` switches it for the forward pass only, and `keep_for_backward` switches it
again while the backward pass of that forward runs.

Exact: every token sees precisely the tokens it would see in its padded row. `way_of` says which of three ways computes it.

Not covered: attention sinks, soft-capped scores, biases; models that have them are refused in
`scoring.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
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
    flash_backward,
    flash_forward,
    set_attention_name,
)

NAME = "toolgrpo_prefix_shared"


def way_of(
    device: str,
    capability: tuple[int, int] | None,  # of a CUDA device
    dtype: torch.dtype,  # in which attention is computed
    head_dim: int,
    value_dim: int,
    *,
    is_cut: bool = False,  # a sliding window is shorter than a row
    dropout: float = 0.0,
) -> Literal["tiles", "flash", "segments"]:
    """Return how attention is computed."""
    if dropout > 0 or head_dim != value_dim:
        return "segments"  # neither kernel takes these
    if device == "cpu":
        return "segments" if is_cut else "tiles"
    # What PyTorch's flash kernels take, backward too: of heads between 192 and 256, RTX cards lack it.
    has_flash = device == "cuda" and capability is not None and capability >= (8, 0)
    in_half = dtype in (torch.float16, torch.bfloat16)
    fits = head_dim % 8 == 0 and (head_dim <= 192 or head_dim == 256)
    return "flash" if has_flash and in_half and fits else "segments"


# One call a layer, where PyTorch's flash kernels run. They take sequences of many lengths, each with as many queries as
# keys or fewer, the last query at the last key. So a segment is a sequence: its queries stand as in the packed sequence,
# and the keys of its path are gathered, once a layer. No mask, no padding, no sorting by size.
#
# Elsewhere PyTorch's SDPA takes one segment after another, under a mask. Invariant: no mask has more than `MOST_MASKED`
# elements, unless one query sees more keys than that.

MOST_MASKED = 2**26  # of one call; the kernels make 16 or 32 bits of each


@dataclass(frozen=True, slots=True)
class SegmentPaths:
    """Sequences of queries, which follow each other in the packed sequence, and the keys that they see."""

    n_queries: list[int]
    n_keys: list[int]
    query_ends: torch.Tensor  # (sequences + 1,) int32: 0, and where each ends
    key_ends: torch.Tensor
    places: torch.Tensor  # of the keys in the packed sequence, sequence after sequence
    window: int | None


def paths_of(
    segments: Sequence[PackedSegment], window: int | None, device: torch.device, *, masked: bool
) -> SegmentPaths:
    """Return each segment with all that its queries see; where masks are needed, in blocks of queries."""
    n_queries, paths = [], []
    for segment in segments:
        path = np.concatenate([np.arange(*span) for span in (*segment.ancestors, (segment.start, segment.end))])
        seen = min(window or len(path), len(path))  # by one query
        # so many queries together see less than twice the keys that one of them sees
        block = max(1, min(seen, MOST_MASKED // (2 * seen))) if masked else segment.length
        for left in range(segment.length, 0, -block):
            n_queries.append(min(block, left))
            paths.append(path[: len(path) - left + n_queries[-1]][-(seen + n_queries[-1] - 1) :])
    n_keys = [len(path) for path in paths]
    ends = [np.cumsum([0, *lengths]) for lengths in (n_queries, n_keys)]
    whole = torch.from_numpy(np.concatenate([*ends, *paths]).astype(np.int32)).to(device)  # one copy
    query_ends, key_ends, places = torch.split(whole, [*map(len, ends), sum(n_keys)])
    return SegmentPaths(n_queries, n_keys, query_ends, key_ends, places, window)


def masks_of(paths: SegmentPaths) -> list[torch.Tensor]:
    """Return what the queries of each sequence see, (Q, K). Made on the device: a host takes longer for it than a GPU
    for the pass.
    """
    masks = []
    for n_queries, n_keys in zip(paths.n_queries, paths.n_keys, strict=True):
        number, seen = (torch.arange(n, device=paths.places.device) for n in (n_queries, n_keys))
        behind = number[:, None] + n_keys - n_queries - seen
        masks.append((behind >= 0) & (behind < (paths.window or n_keys)))
    return masks


class _FlashAttention(torch.autograd.Function):
    """Queries, keys and values are (n_tokens, heads, head_dim), as is the answer."""

    @staticmethod
    def forward(
        ctx: Any, paths: SegmentPaths, scale: float | None, dtype: torch.dtype, *states: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (one.to(dtype) for one in states)
        if len(paths.places) > len(q):  # else nothing is shared, and all keys stand as they should
            k, v = (one.index_select(0, paths.places) for one in (k, v))
        how = (paths.query_ends, paths.key_ends, max(paths.n_queries), max(paths.n_keys), 0.0, paths.window is None)
        seen = {"scale": scale, "window_size_left": (paths.window or 0) - 1, "window_size_right": 0}
        output: torch.Tensor
        output, log_sum, *of_dropout, _ = flash_forward(q, k, v, *how, False, **seen)
        ctx.save_for_backward(q, k, v, output, log_sum, *of_dropout)
        ctx.places, ctx.how, ctx.seen, ctx.dtypes = paths.places, how, seen, [one.dtype for one in states]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *states, seed, offset = ctx.saved_tensors
        grad, *of_paths = flash_backward(grads[0], *states, *ctx.how, seed, offset, **ctx.seen)
        if len(ctx.places) > len(grad):
            of_paths = _summed(torch.cat(of_paths, 1), ctx.places, len(grad)).chunk(2, 1)  # one sum for both
        return None, None, None, *map(torch.Tensor.to, (grad, *of_paths), ctx.dtypes)


def _attend_masked(
    states: Sequence[torch.Tensor],
    paths: SegmentPaths,
    masks: Sequence[torch.Tensor],
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    query, *others = states
    groups = query.shape[1] // others[0].shape[1]
    keys, values = (_Gathered.apply(one, paths.places).repeat_interleave(groups, 1) for one in others)  # type: ignore[no-untyped-call]
    whole = ((query, paths.n_queries), (keys, paths.n_keys), (values, paths.n_keys))
    parts = [torch.split(one.transpose(0, 1).unsqueeze(0), lengths, 2) for one, lengths in whole]
    answers = [
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        for q, k, v, mask in zip(*parts, masks, strict=True)
    ]
    return torch.cat(answers, 2).squeeze(0).transpose(0, 1).contiguous()  # as Transformers' own; AFMoE takes a view


class _Gathered(torch.autograd.Function):
    """Indexing, whose own backward pass sorts the places at each call; that of `index_select` would sum the
    gradients of a place in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.n_tokens = len(states)
        return states.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (places,), (grad,) = ctx.saved_tensors, grads
        return _summed(grad, places, ctx.n_tokens).to(grad.dtype), None


def _summed(grad: torch.Tensor, places: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Return the sum of what was gathered from each place, not yet rounded."""
    exact = _summed_in(grad.dtype)
    return grad.new_zeros(n_tokens, *grad.shape[1:], dtype=exact).index_add_(0, places, grad.to(exact))


# Exact attention over a packed prefix tree on the CPU, every pair of tokens computed once.
#
# The tree is cut into tiles without a mask. Each segment sees itself: a causal square. All that lies
# below a segment sees it whole: one rectangle, however many rows that is. A query's partial outputs
# are joined by their log-sum-exps; backward, each tile needs the joined output and log-sum-exp only,
# and gives its share of the gradients.
#
# It calls the kernels behind PyTorch's own CPU attention (`torch_seam.py`).
#
# Not covered: masks, windows that cut a row, dropout, mixed dtypes and other devices.


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
        # not zeros: the squares come first, and write every row before a rectangle is joined to it
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
    """The segments of one packed sequence, and what each way needs of them (built once, used by every layer)."""

    def __init__(self, segments: tuple[PackedSegment, ...]) -> None:
        self.segments = segments
        self.longest_row = max(segment.position + segment.length for segment in segments)
        self.tiles = functools.cache(lambda: tiles_of(segments))
        self.paths = functools.cache(functools.partial(paths_of, segments))
        self.masks = functools.cache(lambda *of: masks_of(self.paths(*of, masked=True)))


def attend(
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
            f"{type(module).__name__} did not pass `prefix_layout` to its attention, so prompts cannot be shared "
            f"in this model; set prefix_sharing to off."
        )
    device = query.device
    window = None if sliding_window is None or prefix_layout.longest_row <= sliding_window else sliding_window
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    sizes = query.shape[-1], value.shape[-1]
    way = way_of(device.type, _capability(device), dtype, *sizes, is_cut=window is not None, dropout=dropout)
    if way == "tiles":
        groups = query.shape[1] // key.shape[1]
        own, *others = _of_one_type(query, key, value)
        whole_key, whole_value = (states.repeat_interleave(groups, 1) for states in others)
        tree = tree_attention(own, whole_key, whole_value, prefix_layout.tiles(), scaling)
        return tree.transpose(1, 2).contiguous(), None
    flat = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    paths = prefix_layout.paths(window, device, masked=way == "segments")
    if way == "flash":
        answer = _FlashAttention.apply(paths, scaling, dtype, *flat)  # type: ignore[no-untyped-call]
    else:
        answer = _attend_masked(flat, paths, prefix_layout.masks(window, device), scaling, dropout)
    return answer.unsqueeze(0), None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _of_one_type(*states: torch.Tensor) -> list[torch.Tensor]:
    """Return them in the widest number type among them: under autocast, queries and keys come out of the
    rotation in another one than values.
    """
    widest = functools.reduce(torch.promote_types, (one.dtype for one in states))
    return [one.to(widest) for one in states]


AttentionInterface.register(NAME, attend)


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
