"""Every token of a packed tree sees what it would see in its row, however long what stands before it is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.flash_kernels import attending
from toolgrpo.shared_pass.attention import MOST_MASKED, PrefixLayout, _summed, attend, masks_of, paths_of, way_of
from toolgrpo.shared_pass.packing import PackedRow, PackedSegment, Packing, pack

HEADS, WIDTH = 4, 8


def _row(index: int, tokens: list[int], prompt: int) -> PackedRow:
    places = np.arange(len(tokens))
    return PackedRow(index, np.array(tokens), np.where(places < prompt - 1, -100, 1), places)


def _row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: list[int], window: int | None
) -> torch.Tensor:
    """The attention of one row alone, by definition."""
    q, k, v = (states[:, :, places] for states in (query, key, value))
    k, v = (states.repeat_interleave(HEADS // key.shape[1], 1) for states in (k, v))
    behind = torch.arange(len(places))[:, None] - torch.arange(len(places))
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _group(prompt: list[int], lengths: tuple[int, ...], first: int = 0) -> list[PackedRow]:
    """Rows with one prompt and completions of their own."""
    return [
        _row(i, [*prompt, *(1000 * (i + 1) + n for n in range(length))], len(prompt))
        for i, length in enumerate(lengths, first)
    ]


TREES = {
    "long prompt": _group([*range(40)], (3, 9)),
    "short prompt": _group([*range(9)], (40, 25)),
    "halves": _group([*range(20)], (20, 21, 19)),
    "nothing shared": _group([0], (30, 30)),
    "one token each": _group([*range(16)], (1, 2)),
    "a system prompt over two groups": [
        *_group([*range(20), *range(100, 110)], (5, 12)),
        *_group([*range(20), *range(200, 230)], (8, 3, 7), first=2),
        *_group([*range(500, 512)], (4,), first=5),
    ],
}


WAYS = ["as on any CPU", "flash", "segments"]  # on a CPU in tiles, but where a window cuts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("tree", TREES)
def test_outputs_and_gradients_are_those_of_the_row_alone(tree: str, window: int | None, way: str) -> None:
    packing = pack(TREES[tree], min_shared=2)
    if "two groups" in tree:
        assert max(len(segment.ancestors) for segment in packing.segments) == 2
    check(packing, window, way)


@pytest.mark.property
@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 14)), min_size=1),
    window=st.none() | st.integers(1, 9),
    key_heads=st.sampled_from([1, 2, 4]),
    way=st.sampled_from(WAYS),
)
def test_random_trees(rows: list[tuple[list[int], int]], window: int | None, key_heads: int, way: str) -> None:
    packing = pack([_row(i, tokens, prompt) for i, (tokens, prompt) in enumerate(rows)], min_shared=1)
    check(packing, window, way, key_heads)


def check(packing: Packing, window: int | None, way: str, key_heads: int = 2) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, packing.n_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, key_heads, key_heads)
    )
    upstream = torch.randn((1, packing.n_tokens, HEADS, WIDTH), dtype=torch.float64)
    layout = PrefixLayout(packing.segments)
    alone = torch.empty_like(upstream)
    for segment in packing.segments:
        before = [place for start, end in segment.ancestors for place in range(start, end)]
        places = [*before, *range(segment.start, segment.end)]
        outputs = _row_by_row(query, key, value, places, window)[:, :, len(before) :]
        alone[:, segment.start : segment.end] = outputs.transpose(1, 2)

    with nullcontext() if way == WAYS[0] else attending(way):
        packed, _ = attend(torch.nn.Module(), query, key, value, None, sliding_window=window, prefix_layout=layout)
        ours = torch.autograd.grad((packed * upstream).sum(), (query, key, value))
    torch.testing.assert_close(packed, alone)
    theirs = torch.autograd.grad((alone * upstream).sum(), (query, key, value))
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected)


def _segment(n_before: int, length: int, start: int) -> PackedSegment:
    return PackedSegment(start, start + length, n_before, ((0, n_before),) if n_before else ())


@pytest.mark.parametrize(
    ("lengths", "before", "window"),
    [
        ([16_384] * 4, 0, 512),  # whole rows that a window cuts
        ([2_000] * 3, 40_000, None),  # short ends of a long row
        ([3_000], 40_000, 1_024),
    ],
)
def test_masks_have_a_bound(lengths: list[int], before: int, window: int | None) -> None:
    starts = np.cumsum([before, *lengths])
    segments = [_segment(before, length, int(start)) for start, length in zip(starts, lengths, strict=False)]
    found = paths_of(segments, window, torch.device("meta"), masked=True)
    sizes = [mask.numel() for mask in masks_of(found)]
    assert sum(found.n_queries) == sum(lengths) and max(sizes) <= MOST_MASKED
    assert sum(sizes) <= 2 * sum(lengths) * (window or before + max(lengths))


class _LargestOnTheHost(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.numel = max(self.numel, made.numel())
        return made


def test_masks_are_made_where_they_are_used() -> None:
    with _LargestOnTheHost() as host:
        masks = masks_of(paths_of([_segment(1_200, 200, 1_200)], None, torch.device("meta"), masked=True))
    assert [mask.shape for mask in masks] == [(200, 1_400)]
    assert host.numel <= 1_500


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_dim", "others", "way"),
    [
        ("cuda", (9, 0), torch.bfloat16, 128, {}, "flash"),
        ("cuda", (9, 0), torch.bfloat16, 128, {"is_cut": True}, "flash"),
        ("cuda", (8, 0), torch.float16, 256, {}, "flash"),
        ("cuda", (9, 0), torch.float32, 128, {}, "segments"),
        ("cuda", (7, 5), torch.float16, 128, {}, "segments"),
        ("cuda", (8, 9), torch.bfloat16, 224, {}, "segments"),
        ("cuda", (9, 0), torch.bfloat16, 512, {}, "segments"),
        ("cuda", (9, 0), torch.bfloat16, 60, {}, "segments"),
        ("cuda", (9, 0), torch.bfloat16, 128, {"dropout": 0.1}, "segments"),
        ("mps", None, torch.bfloat16, 128, {}, "segments"),
        ("cpu", None, torch.bfloat16, 60, {}, "tiles"),
        ("cpu", None, torch.float32, 128, {"is_cut": True}, "segments"),
    ],
)
def test_the_way_follows_device_type_and_sizes(
    device: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, others: Any, way: str
) -> None:
    assert way_of(device, capability, dtype, head_dim, head_dim, **others) == way
    assert way_of(device, capability, dtype, head_dim, head_dim // 2, **others) == "segments"


@pytest.mark.parametrize("way", ["flash", "segments"])
def test_no_backward_pass_sorts_places(way: str) -> None:
    packing = pack(TREES["halves"], min_shared=2)
    layout = PrefixLayout(packing.segments)
    query, key, value = (torch.randn(1, n, packing.n_tokens, WIDTH, requires_grad=True) for n in (HEADS, 2, 2))
    with attending(way):
        answer, _ = attend(torch.nn.Module(), query, key, value, None, prefix_layout=layout)
    names, left = set(), [answer.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(type(node).__name__)
            left += [before for before, _ in node.next_functions]
    assert names & {"_GatheredBackward", "_FlashAttentionBackward"}
    assert not [name for name in names if name.startswith("Index")]


def test_gradients_of_a_shared_place_are_not_summed_in_16_bits() -> None:
    ones = torch.ones(1000, 1, 1, dtype=torch.bfloat16)
    assert _summed(ones, torch.zeros(1000, dtype=torch.int32), 2).flatten().tolist() == [1000, 0]
