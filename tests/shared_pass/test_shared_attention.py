"""Every token of a packed tree sees what it would see in its row, however long what stands before it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from toolgrpo.shared_pass import attention
from toolgrpo.shared_pass.attention import PrefixLayout, _attend
from toolgrpo.shared_pass.packing import PackedRow, PackedSegment, pack

HEADS, KEY_VALUE_HEADS, WIDTH = 4, 2, 8


def _row(index: int, tokens: list[int], prompt: int) -> PackedRow:
    places = np.arange(len(tokens))
    return PackedRow(index, np.array(tokens), np.where(places < prompt - 1, -100, 1), places)


def _row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: list[int], window: int | None
) -> torch.Tensor:
    """The attention of one row alone, by definition."""
    q, k, v = (states[:, :, places] for states in (query, key, value))
    k, v = (states.repeat_interleave(HEADS // KEY_VALUE_HEADS, 1) for states in (k, v))
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


@pytest.mark.parametrize("by_tiles", [True, False], ids=["tiles", "segments"])
@pytest.mark.parametrize("window", [None, 1, 5, 20, 64])
@pytest.mark.parametrize("tree", TREES)
def test_outputs_and_gradients_are_those_of_the_row_alone(
    tree: str, window: int | None, by_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tiles, as on the CPU, and segment by segment, as elsewhere."""
    if not by_tiles:
        monkeypatch.setattr(attention, "fits", lambda *_: False)
    torch.manual_seed(0)
    packing = pack(TREES[tree], min_shared=2)
    if "two groups" in tree:
        assert max(len(segment.ancestors) for segment in packing.segments) == 2
    shape = (1, HEADS, packing.n_tokens, WIDTH)
    query = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn((1, KEY_VALUE_HEADS, *shape[2:]), dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    upstream = torch.randn((1, packing.n_tokens, HEADS, WIDTH), dtype=torch.float64)
    layout = PrefixLayout(packing.segments)
    packed, _ = _attend(torch.nn.Module(), query, key, value, None, sliding_window=window, prefix_layout=layout)

    alone = torch.empty_like(packed)
    for segment in packing.segments:
        before = [place for start, end in segment.ancestors for place in range(start, end)]
        places = [*before, *range(segment.start, segment.end)]
        outputs = _row_by_row(query, key, value, places, window)[:, :, len(before) :]
        alone[:, segment.start : segment.end] = outputs.transpose(1, 2)

    torch.testing.assert_close(packed, alone)
    ours = torch.autograd.grad((packed * upstream).sum(), (query, key, value))
    theirs = torch.autograd.grad((alone * upstream).sum(), (query, key, value))
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected)


def _segment(n_before: int, length: int, start: int) -> PackedSegment:
    return PackedSegment(start, start + length, n_before, ((0, n_before),) if n_before else ())


@pytest.mark.parametrize(
    ("lengths", "before", "window", "n_masked"),
    [
        ([16_384] * 4, 0, 512, 4 * 16_384),  # whole rows that a window cuts
        ([2_000] * 3, 40_000, None, 3 * 2_000),  # short ends of a long row
        ([3_000], 40_000, 1_024, 3_000),
    ],
)
def test_masks_have_a_bound(lengths: list[int], before: int, window: int | None, n_masked: int) -> None:
    starts = np.cumsum([before, *lengths])
    segments = [_segment(before, length, int(start)) for start, length in zip(starts, lengths, strict=False)]
    found = attention.batches_of(segments, window, torch.device("cpu"))
    sizes = [one.mask.numel() for one in found.batches if one.mask is not None]
    assert len(sizes) == len(found.batches) and len(found.order.unique()) == n_masked, "all of them are masked"
    assert max(sizes) <= attention.MOST_MASKED
    assert sum(sizes) <= 4 * n_masked * (window or before + max(lengths)), "but for padding up to twice, each way"


class _LargestOnTheHost(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.numel = max(self.numel, made.numel())
        return made


def test_masks_are_made_where_they_are_used() -> None:
    with _LargestOnTheHost() as host:
        found = attention.batches_of([_segment(1_200, 200, 1_200)], None, torch.device("meta"))
    assert [one.mask.shape for one in found.batches if one.mask is not None] == [(1, 1, 200, 1_400)]
    assert host.numel <= 1_400


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "taken"),
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((8, 0), torch.float16, 256, True),
        ((9, 0), torch.float32, 128, False),
        ((7, 5), torch.float16, 128, False),
        ((9, 0), torch.bfloat16, 512, False),
        (None, torch.bfloat16, 128, False),
    ],
)
def test_queries_in_groups_are_for_flash_alone(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, taken: bool
) -> None:
    assert attention.flash_takes_groups(capability, dtype, head_dim) is taken


def test_keys_are_gathered_without_sorting_and_repeated_for_kernels_that_want_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = F.scaled_dot_product_attention

    def spied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        assert not options["enable_gqa"] and key.shape[1] == query.shape[1]
        few_keys, few_values = (states[:, :: HEADS // KEY_VALUE_HEADS] for states in (key, value))
        result: torch.Tensor = whole(query, key, value, **options)
        torch.testing.assert_close(result, whole(query, few_keys, few_values, **{**options, "enable_gqa": True}))
        return result

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    packing = pack(TREES["halves"], min_shared=2)
    states = [torch.randn(1, n, packing.n_tokens, WIDTH, requires_grad=True) for n in (HEADS, 2, 2)]
    query, key, value = states
    batches = PrefixLayout(packing.segments).batches(None, query.device)
    names, left = set(), [attention.attend_in_batches(query, key, value, batches, None, 0.0).grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(type(node).__name__)
            left += [before for before, _ in node.next_functions]
    assert "_GatheredBackward" in names and not [
        name for name in names if name.startswith("Index") and "Select" not in name
    ]
