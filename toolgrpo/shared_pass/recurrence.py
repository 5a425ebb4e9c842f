"""Recurrent layers over a packed prefix tree: each segment begins in the state in which its parent ended.

`convolve` hands a short causal convolution what stands before each segment in its row; `scan` walks
the tree from the root, batch by batch, and hands the state at the end of a segment to all that
branch from it. So a shared beginning is computed once, and its gradient is summed over its branches
by autograd.

Exact: padding stands behind a segment, and whoever steps the recurrence leaves a state as it is
there. Tensors are cut and joined with `split` and `cat`, whose backward passes copy each number once.

Pure functions; `recurrent_seam.py` hands them what models compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from toolgrpo.shared_pass.packing import PackedSegment

Step = Callable[[Sequence[torch.Tensor], torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]]
"""`(inputs, initial states, whether the last states are wanted) -> (outputs, last states)`, batch first."""


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments of one depth, as long within a factor of two, that are computed together."""

    numbers: tuple[int, ...]  # of the segments in the packed sequence
    lengths: tuple[int, ...]
    parents: tuple[int, ...]  # none for roots
    have_children: bool


class SegmentTree:
    """The segments of one packed sequence by depth."""

    def __init__(self, segments: Sequence[PackedSegment]) -> None:
        self.lengths = [segment.length for segment in segments]
        number_at = {segment.start: number for number, segment in enumerate(segments)}
        self.parents = [number_at[segment.ancestors[-1][0]] if segment.ancestors else None for segment in segments]
        inner = set(self.parents)
        sorted_in: dict[tuple[int, bool, int], list[int]] = {}
        for number, segment in enumerate(segments):
            key = (len(segment.ancestors), number in inner, segment.length.bit_length())
            sorted_in.setdefault(key, []).append(number)
        self.batches = tuple(self._batch(sorted_in[key], key[1]) for key in sorted(sorted_in))

    def _batch(self, numbers: list[int], have_children: bool) -> SegmentBatch:
        parents = [parent for parent in (self.parents[number] for number in numbers) if parent is not None]
        return SegmentBatch(
            tuple(numbers), tuple(self.lengths[number] for number in numbers), tuple(parents), have_children
        )


def convolve(
    tree: SegmentTree,
    inputs: torch.Tensor,  # (1, channels, n_tokens)
    width: int,
    convolution: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Convolve each token with the `width - 1` tokens before it in its row.

    `convolution` is causal, and as long as what it is given.
    """
    before = width - 1
    nothing = inputs.new_zeros(1, inputs.shape[1], before)
    ends: list[torch.Tensor] = []  # of each segment's row, its last tokens
    pieces: list[torch.Tensor] = []
    for own, parent in zip(torch.split(inputs, tree.lengths, 2), tree.parents, strict=True):
        context = nothing if parent is None else ends[parent]
        ends.append(torch.cat([context, own[:, :, -before:]], 2)[:, :, -before:])
        pieces += [context, own]
    sizes = [size for length in tree.lengths for size in (before, length)]
    return torch.cat(torch.split(convolution(torch.cat(pieces, 2)), sizes, 2)[1::2], 2)


def scan(tree: SegmentTree, inputs: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
    """Run a recurrence along all rows; inputs and output are (1, n_tokens, ...)."""
    parts = [torch.split(one[0], tree.lengths) for one in inputs]
    states: dict[int, torch.Tensor] = {}
    outputs: list[torch.Tensor] = [inputs[0]] * len(tree.lengths)
    for batch in tree.batches:
        initial = torch.stack([states[parent] for parent in batch.parents]) if batch.parents else None
        padded = [_padded([part[number] for number in batch.numbers]) for part in parts]
        output, last = step(padded, initial, batch.have_children)
        sizes = [size for length in batch.lengths for size in (length, output.shape[1] - length)]
        for number, piece in zip(batch.numbers, torch.split(output.flatten(0, 1), sizes)[::2], strict=True):
            outputs[number] = piece
        if batch.have_children:
            assert last is not None
            states.update(zip(batch.numbers, last.unbind(), strict=True))
    return torch.cat(outputs)[None]


def _padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return (B, T, ...): the parts with zeros behind them."""
    longest = max(len(part) for part in parts)
    pieces = [piece for part in parts for piece in (part, part.new_zeros(longest - len(part), *part.shape[1:]))]
    return torch.cat(pieces).view(len(parts), longest, *parts[0].shape[1:])
