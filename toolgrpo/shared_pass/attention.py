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
`tree_attention` computes each pair once; elsewhere, and where a sliding window cuts rows, it is one
SDPA call per segment, whose keys a window crops and masks by position.

Not covered: attention sinks, soft-capped scores, biases; models that have them are refused in
`scoring.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from toolgrpo.errors import ModelError
from toolgrpo.shared_pass.packing import Segment
from toolgrpo.shared_pass.torch_seam import after_backward_pass, attention_name, set_attention_name
from toolgrpo.shared_pass.tree_attention import fits, tiles_of, tree_attention

__all__ = ["NAME", "PrefixLayout", "keep_for_backward", "shared_attention"]

NAME = "toolgrpo_prefix_shared"


class PrefixLayout:
    """The segments of one packed sequence,
    and the masks their attention needs (built once, used by every layer).
    """

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.tiles = tiles_of(segments)
        self.longest_row = max(segment.position + segment.length for segment in segments)
        self._masks: dict[tuple[int, int, int | None, torch.device], torch.Tensor] = {}

    def mask(self, n_queries: int, n_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return bool (n_queries, n_keys): the last query, at the last key, sees `window` back."""
        key = (n_queries, n_keys, window, device)
        if key not in self._masks:
            behind = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(
                n_keys, device=device
            )
            self._masks[key] = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        return self._masks[key]


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
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    in_window = sliding_window is None or prefix_layout.longest_row <= sliding_window
    if in_window and fits(query, key, value, dropout):
        return tree_attention(query, key, value, prefix_layout.tiles, scaling).transpose(1, 2).contiguous(), None
    outputs = [
        _attend_segment(query, key, value, segment, prefix_layout, sliding_window, dropout_p=dropout, scale=scaling)
        for segment in prefix_layout.segments
    ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _attend_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment: Segment,
    layout: PrefixLayout,
    window: int | None,
    **options: Any,
) -> torch.Tensor:
    """Return one segment's outputs.

    Causal attention skips the half that a mask computes and throws away.

    So a segment longer than what stands before it brings its ancestors' queries along (computed
    again, and dropped), which makes it a plain causal row; a shorter one is masked; a windowed one
    always is, unless the window holds it all.
    """
    first = 0 if window is None else max(0, segment.position - window + 1)
    keys, values = _visible(key, segment, first), _visible(value, segment, first)
    n_keys = keys.shape[2]
    all_in_window = window is None or n_keys <= window
    if all_in_window and n_keys < 2 * segment.length:
        queries = _visible(query, segment, first)
        outputs = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, **options)
        return outputs[:, :, n_keys - segment.length :]
    queries = query[:, :, segment.start : segment.end]
    mask = layout.mask(segment.length, n_keys, window, query.device)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, **options)


def _visible(states: torch.Tensor, segment: Segment, first: int) -> torch.Tensor:
    """Return keys or values of a segment's row from `first` on: ancestors', then its own."""
    parts, position = [], 0
    for start, end in (*segment.ancestors, (segment.start, segment.end)):
        skip = max(0, first - position)
        position += end - start
        if start + skip < end:
            parts.append((start + skip, end))
    if all(a[1] == b[0] for a, b in itertools.pairwise(parts)):
        return states[:, :, parts[0][0] : parts[-1][1]]
    return torch.cat([states[:, :, start:end] for start, end in parts], 2)


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
