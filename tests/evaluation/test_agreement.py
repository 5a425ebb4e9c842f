"""Log-probabilities of an engine against those of the model, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.segments import cut_into_segments
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.engines.decode_batch import processed_logprobs
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.evaluation.agreement import NOTHING_DRAWN, differences, drawn_tokens

PROMPT, IDS, MASK = (5, 6, 7), (8, 9, 10, 11), (1, 0, 1, 1)


def trajectory(logprobs: tuple[float | None, ...], *weights: tuple[int, int]) -> Trajectory:
    turns = tuple(Turn(0, 4, "", None, weights=one) for one in weights)
    return Trajectory(PROMPT, IDS, MASK, logprobs, (), turns, StopReason.FINISHED)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0.7),
        SamplingOptions(temperature=1.3, top_k=300),
        SamplingOptions(top_p=0.999999, min_p=1e-9),
        SamplingOptions(repetition_penalty=1.2),
    ],
    ids=str,
)
def test_sampled_tokens_are_compared_as_the_engine_drew_them(tiny_qwen3: Any, options: SamplingOptions) -> None:
    model = tiny_qwen3(0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*PROMPT, *IDS]])).logits[0, len(PROMPT) - 1 : -1].float()
    seen = [(*PROMPT, *IDS[:place]) for place in range(len(IDS))]
    own = processed_logprobs(logits, options, seen).gather(-1, torch.tensor(IDS)[:, None])[:, 0].tolist()
    exact = trajectory((own[0], None, own[2], own[3]))
    off = trajectory((own[0] + 0.3, None, own[2], own[3]))
    assert differences(model, drawn_tokens([exact]), options) == pytest.approx([0.0] * 3, abs=1e-5)
    assert differences(model, drawn_tokens([off]), options) == pytest.approx([0.3, 0.0, 0.0], abs=1e-5)
    if options.repetition_penalty == 1.0:
        in_two = drawn_tokens([cut_into_segments(off, 2)])
        assert len(in_two) == 2 and sum(differences(model, in_two, options)) == pytest.approx(0.3, abs=1e-5)


def test_a_token_on_the_other_side_of_a_cut_is_compared_as_without_it(tiny_qwen3: Any) -> None:
    model = tiny_qwen3(0)
    drawn = drawn_tokens([trajectory((-3.0, None, -3.0, -3.0))])
    greatest = differences(model, drawn, SamplingOptions(top_k=1))
    assert greatest == differences(model, drawn, SamplingOptions())


def test_what_is_looked_at(tiny_qwen3: Any) -> None:
    given = (-1.0, None, -1.0, -1.0)
    assert drawn_tokens([trajectory((None,) * 4)]) == []
    assert differences(tiny_qwen3(0), [NOTHING_DRAWN], SamplingOptions()) == []
    assert drawn_tokens([trajectory(given, (2, 2))], step=3) == [], "weights of another step drew it"
    assert drawn_tokens([trajectory(given, (2, 3))], step=3) == []
    assert len(drawn_tokens([trajectory(given, (3, 3)), trajectory(given)], step=3)) == 2
    long = Trajectory(PROMPT, IDS * 50, (1,) * 200, (-1.0,) * 200, (), (), StopReason.FINISHED)
    assert [len(one.ids) for one in drawn_tokens([long, long])] == [64], "that is enough"
