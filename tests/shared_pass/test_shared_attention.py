"""Every token of a packed tree sees what it would see in its row, however long what stands before it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from toolgrpo.shared_pass import attention
from toolgrpo.shared_pass.attention import PrefixLayout, _attend
from toolgrpo.shared_pass.packing import Row, pack

HEADS, KEY_VALUE_HEADS, WIDTH = 4, 2, 8


def _row(index: int, tokens: list[int], prompt: int) -> Row:
    places = np.arange(len(tokens))
    return Row(index, np.array(tokens), np.where(places < prompt - 1, -100, 1), places)


def _row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: list[int], window: int | None
) -> torch.Tensor:
    """The attention of one row alone, by definition."""
    q, k, v = (states[:, :, places] for states in (query, key, value))
    k, v = (states.repeat_interleave(HEADS // KEY_VALUE_HEADS, 1) for states in (k, v))
    behind = torch.arange(len(places))[:, None] - torch.arange(len(places))
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _group(prompt: list[int], lengths: tuple[int, ...], first: int = 0) -> list[Row]:
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
