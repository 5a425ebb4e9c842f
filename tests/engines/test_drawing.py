"""Drawing from logits: what can be drawn, and that its log-probability is that of the distribution drawn from."""

import math
from typing import Any

import pytest
import torch

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.engines.decode_batch import draw, processed_logprobs

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1])
LOGITS = PROBS.log().unsqueeze(0) + 3.0  # logits are only known up to a constant


def left_over(**options: Any) -> list[float]:
    return processed_logprobs(LOGITS, SamplingOptions(**options), [[]]).exp()[0].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 4}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # of what top_k left, 0.83 is more than 0.8
        ({"temperature": 0.0}, [0.5, 0.25, 0.15, 0.1]),  # greedy is not scaled
    ],
)
def test_what_is_left_to_draw_from(options: dict[str, float], expected: list[float]) -> None:
    assert left_over(**options) == pytest.approx(expected, abs=1e-6)


def test_the_repetition_penalty_hits_seen_tokens_of_the_row_only() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    logprobs = processed_logprobs(logits, SamplingOptions(repetition_penalty=2.0), [[0, 1, 1], []])
    expected = torch.tensor([[1.0, -4.0, 1.0], [2.0, -2.0, 1.0]]).log_softmax(-1)
    assert torch.allclose(logprobs, expected)


def test_greedy_takes_the_most_likely_token_and_a_draw_follows_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    greedy = draw(LOGITS, SamplingOptions(temperature=0.0), [[]], [generator])
    assert greedy.tokens == [0]
    assert greedy.logprobs == pytest.approx([math.log(0.5)])
    drawn = draw(LOGITS.expand(n, -1), SamplingOptions(top_k=3), [[]] * n, [generator] * n)
    counts = torch.bincount(torch.tensor(drawn.tokens), minlength=4) / n
    assert counts.tolist() == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=0.015)
    assert drawn.logprobs[:50] == pytest.approx([math.log(PROBS[t].item() / 0.9) for t in drawn.tokens[:50]])


def test_low_precision_logits_are_drawn_from_in_fp32() -> None:
    drawn = draw(LOGITS.bfloat16(), SamplingOptions(temperature=0.0), [[]], [torch.Generator()])
    expected = LOGITS.bfloat16().float().log_softmax(-1)[0, 0].item()
    assert drawn.logprobs == [expected]
