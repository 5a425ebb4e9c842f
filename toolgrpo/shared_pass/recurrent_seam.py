"""Reach the recurrent layers of Transformers' hybrids, which take no layout of a packed sequence.

Tested with Transformers 5.19. A layer calls functions of its model's own module, and hands its
keyword arguments down to them (LFM2's convolution only `seq_idx`). `share_recurrences` puts a
function in the place of each that does as before, except where the layout of a packed prefix tree
comes with it:

* `causal_conv1d_fn`: every family;
* `torch_chunk_gated_delta_rule`: Qwen3-Next, Qwen3.5 (Gated DeltaNet);
* `mamba2_chunk_scan`, and `mamba2_split_conv1d_scan_combined`, which computes a whole layer at once and
  must answer None: Nemotron-H, Granite 4 (Mamba-2).

`tests/shared_pass/test_hybrids.py` pins names and arguments. What a layer did not hand down is an
error after the forward pass (`RecurrentLayout.check`).

Each segment begins in the state in which its parent ended. `convolve` hands a short causal convolution
what stands before each segment in its row; `scan` walks the tree from the root, batch by batch, and
hands the state at the end of a segment to all that branch from it. So a shared beginning is computed
once, and its gradient is summed over its branches by autograd. Exact: padding stands behind a segment,
and whoever steps the recurrence leaves a state as it is there.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from toolgrpo.errors import ModelError
from toolgrpo.shared_pass.packing import PackedSegment

_CHUNK_ON_CPU = 64  # tokens that PyTorch's own form of Mamba-2 compares pair by pair, in memory

Function = Callable[..., Any]
TakesLayouts = Callable[[Function], Function]
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
    """The segments of one packed sequence by depth.

    Tensors over it are cut and joined with `split` and `cat`, whose backward passes copy each number once.
    """

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


class RecurrentLayout:
    """The tree of one packed sequence, and how often a function of the model walked it."""

    def __init__(self, segments: Sequence[PackedSegment]) -> None:
        self.tree = SegmentTree(segments)
        self.walks: Counter[str] = Counter()

    def check(self, config: Any) -> None:
        """Raise unless each recurrent layer of the model walked the tree in each of its functions."""
        kinds = config.layer_types
        expected = kinds.count("linear_attention") + kinds.count("conv")
        for name in _FUNCTIONS[config.model_type]:
            if name != _WHOLE_LAYER and self.walks[name] != expected:
                raise ModelError(
                    f"{self.walks[name]} of {expected} recurrent layers of {config.model_type} computed shared prompts "
                    f"in `{name}`; set prefix_sharing to off."
                )


def is_known_hybrid(config: Any) -> bool:
    """Return whether this model has recurrent layers that can walk a tree."""
    return config.model_type in _FUNCTIONS


def module_of(model_type: str) -> ModuleType:
    """Return the module that holds the layers of this family."""
    family = model_type.removesuffix("_text")
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@functools.cache
def share_recurrences(model_type: str) -> None:
    """Let the functions of this family take layouts, from now on."""
    for name, taking_layouts in _FUNCTIONS[model_type].items():
        setattr(module_of(model_type), name, taking_layouts(getattr(module_of(model_type), name)))


def _convolution(original: Function) -> Function:
    @functools.wraps(original)
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        seq_idx: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(seq_idx, RecurrentLayout):
            return original(hidden_states, weight, bias, activation=activation, seq_idx=seq_idx, **kwargs)
        seq_idx.walks["causal_conv1d_fn"] += 1
        return convolve(
            seq_idx.tree,
            hidden_states,
            weight.shape[-1],
            lambda states: original(states, weight, bias, activation=activation),
        )

    return causal_conv1d_fn


def _delta_rule(original: Function) -> Function:
    @functools.wraps(original)
    def torch_chunk_gated_delta_rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seq_idx: Any = None, **kwargs: Any
    ) -> Any:
        if not isinstance(seq_idx, RecurrentLayout):
            return original(query, key, value, **kwargs)
        seq_idx.walks["torch_chunk_gated_delta_rule"] += 1

        def step(inputs: Sequence[torch.Tensor], initial: torch.Tensor | None, wants_last: bool) -> Any:
            *states, decay, beta = inputs  # zeros in the last two leave a state as it is
            how = {**kwargs, "g": decay, "beta": beta, "initial_state": initial, "output_final_state": wants_last}
            return original(*states, **how)

        return scan(seq_idx.tree, (query, key, value, kwargs["g"], kwargs["beta"]), step), None

    return torch_chunk_gated_delta_rule


def _mamba2(original: Function) -> Function:
    @functools.wraps(original)
    def mamba2_chunk_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        seq_idx: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(seq_idx, RecurrentLayout):
            return original(hidden_states, dt, A, B, C, seq_idx=seq_idx, **kwargs)
        seq_idx.walks["mamba2_chunk_scan"] += 1
        low, high = kwargs["dt_limit"]
        # Here and not inside, where padding would become a step of time: one of zero leaves a state as it is.
        steps = F.softplus(dt + kwargs["dt_bias"].to(dt.dtype)).clamp(low, high)
        how = {**kwargs, "dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))}
        if dt.device.type == "cpu":
            how["chunk_size"] = min(kwargs["chunk_size"], _CHUNK_ON_CPU)

        def step(inputs: Sequence[torch.Tensor], initial: torch.Tensor | None, wants_last: bool) -> Any:
            states, of_time, into, out_of = inputs
            found = original(
                states,
                of_time,
                A,
                into,
                out_of,
                **{**how, "initial_states": initial, "return_final_states": wants_last},
            )
            return found if wants_last else (found, None)

        return scan(seq_idx.tree, (hidden_states, steps, B, C), step)

    return mamba2_chunk_scan


def _whole_layer(original: Function) -> Function:
    @functools.wraps(original)
    def mamba2_split_conv1d_scan_combined(*args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        if not isinstance(seq_idx, RecurrentLayout):
            return original(*args, seq_idx=seq_idx, **kwargs)
        return None  # the layer goes on with the functions above

    return mamba2_split_conv1d_scan_combined


_WHOLE_LAYER = "mamba2_split_conv1d_scan_combined"
_CONVOLUTION: dict[str, TakesLayouts] = {"causal_conv1d_fn": _convolution}
_GATED_DELTA_NET: dict[str, TakesLayouts] = {**_CONVOLUTION, "torch_chunk_gated_delta_rule": _delta_rule}
_MAMBA2: dict[str, TakesLayouts] = {**_CONVOLUTION, "mamba2_chunk_scan": _mamba2, _WHOLE_LAYER: _whole_layer}
_FUNCTIONS: dict[str, dict[str, TakesLayouts]] = {
    "qwen3_next": _GATED_DELTA_NET,
    "qwen3_5_text": _GATED_DELTA_NET,
    "qwen3_5_moe_text": _GATED_DELTA_NET,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "nemotron_h": _MAMBA2,
    "granitemoehybrid": _MAMBA2,
}
