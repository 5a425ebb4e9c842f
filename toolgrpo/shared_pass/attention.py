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
of like size are computed in one SDPA call (`segment_batches.py`).

Not covered: attention sinks, soft-capped scores, biases; models that have them are refused in
`scoring.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from toolgrpo.errors import ModelError
from toolgrpo.shared_pass.packing import Segment
from toolgrpo.shared_pass.segment_batches import SegmentBatches, attend_in_batches, batches_of
from toolgrpo.shared_pass.torch_seam import after_backward_pass, attention_name, set_attention_name
from toolgrpo.shared_pass.tree_attention import fits, tiles_of, tree_attention

NAME = "toolgrpo_prefix_shared"


class PrefixLayout:
    """The segments of one packed sequence,
    and the batches their attention is computed in (built once, used by every layer).
    """

    def __init__(self, segments: tuple[Segment, ...]) -> None:
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
