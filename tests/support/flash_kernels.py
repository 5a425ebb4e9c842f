"""Stand-ins on the CPU for PyTorch's flash kernels over sequences of many lengths, which only GPUs have.

They stand in the dispatcher, so PyTorch's schema checks what they are asked for, and `torch.nn.attention.varlen` reaches
them too. Each computes by definition, sequence after sequence, and asks for what the kernels ask for (`flash_api.cpp`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from toolgrpo.shared_pass import attention


def _sequences(q: torch.Tensor, k: torch.Tensor, how: tuple[Any, ...], left: int, right: int) -> Iterator[Any]:
    """Yield the queries and keys of each sequence, and which keys are hidden: the last query stands at the last key."""
    ends_q, ends_k, most_q, most_k, dropout, causal = how
    assert q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2] and q.shape[2] % 8 == 0 and q.stride(2) == 1
    assert ends_q.dtype == ends_k.dtype == torch.int32 and ends_q[-1] == len(q) and ends_k[-1] == len(k)
    assert dropout == 0 and right == 0 and causal == (left < 0)
    for (start, end), (first, last) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        n_queries, n_keys = end - start, last - first
        assert 0 < n_queries <= min(most_q, n_keys) and n_keys <= most_k
        behind = torch.arange(n_queries)[:, None] + n_keys - n_queries - torch.arange(n_keys)
        yield slice(start, end), slice(first, last), (behind < 0) | ((behind > left) & (left >= 0))


def _exact(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (heads, n, width), in at least 32 bits."""
    exact = states.to(torch.promote_types(states.dtype, torch.float32))
    return exact.repeat_interleave(heads // states.shape[1], 1).transpose(0, 1)


def _forward(q: Any, k: Any, v: Any, *how: Any, scale: Any = None, **window: Any) -> tuple[torch.Tensor, ...]:
    assert q.dtype == k.dtype == v.dtype and k.shape == v.shape and not how[-1]
    left, right = window["window_size_left"], window["window_size_right"]
    output, sums = torch.empty_like(q), []
    for queries, keys, hidden in _sequences(q, k, how[:-1], left, right):
        own, seen, values = (_exact(one, q.shape[1]) for one in (q[queries], k[keys], v[keys]))
        scores = own @ seen.mT * (q.shape[2] ** -0.5 if scale is None else scale)
        scores.masked_fill_(hidden, float("-inf"))
        sums.append(scores.logsumexp(-1))
        output[queries] = (scores.softmax(-1) @ values).transpose(0, 1)
    return output, torch.cat(sums, 1), torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(0)


def _backward(
    grad: Any, q: Any, k: Any, v: Any, output: Any, sums: Any, *how: Any, scale: Any = None, **window: Any
) -> tuple[torch.Tensor, ...]:
    left, right = window["window_size_left"], window["window_size_right"]
    by = q.shape[2] ** -0.5 if scale is None else scale
    grads, heads = [torch.empty_like(one) for one in (q, k, v)], q.shape[1]
    for queries, keys, hidden in _sequences(q, k, how[:-2], left, right):
        own, answers, upstream = (_exact(one[queries], heads) for one in (q, output, grad))
        seen, values = (_exact(one[keys], heads) for one in (k, v))
        share = (own @ seen.mT * by - sums[:, queries, None]).masked_fill_(hidden, float("-inf")).exp()
        of_scores = by * share * (upstream @ values.mT - (upstream * answers).sum(-1, keepdim=True))
        parts = of_scores @ seen, of_scores.mT @ own, share.mT @ upstream
        for total, places, part in zip(grads, (queries, keys, keys), parts, strict=True):
            total[places] = part.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1).to(total.dtype)
    return tuple(grads)


@contextmanager
def attending(way: str) -> Iterator[dict[str, Any]]:
    """Let the shared pass attend in this way, here on the CPU; keep what each kernel was asked for last."""
    asked: dict[str, Any] = {}

    def keeping(name: str, kernel: Any) -> Any:
        def kept(*args: Any, **options: Any) -> Any:
            # From the 13th on: the state of a dropout that there is not.
            asked[name] = *args[:12], {key: value for key, value in options.items() if value is not None}
            return kernel(*args, **options)

        return kept

    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("aten", "IMPL") as library:
        patch.setattr(attention, "way_of", lambda *_, **__: way)
        for name, kernel in (("forward", _forward), ("backward", _backward)):
            library.impl(f"_flash_attention_{name}", keeping(name, kernel), "CPU")
        yield asked
