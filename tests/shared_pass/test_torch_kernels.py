"""What `toolgrpo.shared_pass.torch_seam` takes from PyTorch and PyTorch does not promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from tests.support.flash_kernels import attending
from toolgrpo.shared_pass.attention import PrefixLayout, attend
from toolgrpo.shared_pass.packing import PackedSegment
from toolgrpo.shared_pass.torch_seam import cpu_attention_backward, cpu_attention_forward

pytestmark = pytest.mark.contract

SCALE = 0.3


@pytest.fixture
def states() -> list[torch.Tensor]:
    """Queries of 7 tokens, keys and values of 12."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64) for n in (7, 12, 12)]


def test_the_forward_kernel_gives_the_log_sum_exp_of_the_scaled_scores(states: list[torch.Tensor]) -> None:
    query, key, value = states
    output, log_sum = cpu_attention_forward(query, key, value, 0.0, False, scale=SCALE)
    scores = SCALE * query @ key.transpose(-1, -2)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1))
    torch.testing.assert_close(output, scores.softmax(-1) @ value)


def test_the_backward_kernel_takes_a_joined_output_and_log_sum_exp(states: list[torch.Tensor]) -> None:
    """Given those of all keys, it answers for some keys with their share of the whole gradients."""
    query, key, value = (state.requires_grad_() for state in states)
    whole = F.scaled_dot_product_attention(query, key, value, scale=SCALE)
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (query, key, value), upstream)
    with torch.no_grad():
        output, log_sum = cpu_attention_forward(query, key, value, 0.0, False, scale=SCALE)
        halves = zip(key.split([5, 7], 2), value.split([5, 7], 2), strict=True)
        parts = [
            cpu_attention_backward(upstream, query, k, v, output, log_sum, 0.0, False, scale=SCALE) for k, v in halves
        ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], expected[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], 2), expected[i])


@pytest.mark.parametrize("window", [None, 3])
def test_the_flash_kernels_are_asked_for_what_varlen_attn_asks_them_for(window: int | None) -> None:
    """Which is public, and whose documentation says what a window is; the kernels are not."""
    torch.manual_seed(0)
    layout = PrefixLayout((PackedSegment(0, 5, 0, ()), PackedSegment(5, 9, 5, ((0, 5),))))
    query, key, value = (torch.randn(1, heads, 9, 8, requires_grad=True) for heads in (4, 2, 2))
    paths = layout.paths(window, query.device, masked=False)
    q, k, v = (one[0].transpose(0, 1).detach() for one in (query, key, value))
    k, v = k[paths.places.long()], v[paths.places.long()]
    ends, most = (paths.query_ends, paths.key_ends), (5, 9 if window is None else 6)
    how: Any = {"window_size": (-1 if window is None else window - 1, 0), "enable_gqa": True, "scale": SCALE}
    with attending("flash") as theirs:
        varlen_attn(q, k.requires_grad_(), v, *ends, *most, **how).sum().backward()  # type: ignore[union-attr]
    with attending("flash") as ours:
        attend(torch.nn.Module(), query, key, value, None, 0.0, SCALE, window, layout)[0].sum().backward()
    assert set(ours) == {"forward", "backward"}
    torch.testing.assert_close(ours, theirs)
