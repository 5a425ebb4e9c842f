"""How probable answers are behind the beginnings of episodes: shared and padded, against the model's own words."""

from __future__ import annotations

import pytest
import torch

from toolgrpo.shared_pass.answers import Question, mean_answer_logps
from toolgrpo.testing import tiny_qwen3
from toolgrpo.trainer.trl_seam import add_fused_head

PROMPT = list(range(3, 43))
EPISODE = [*PROMPT, *range(60, 100)]
QUESTIONS: list[Question] = [
    (PROMPT, [5, 6, 7]),
    (EPISODE, [5, 6, 7]),
    ([*EPISODE, *range(100, 130)], [9]),
    ([4], [8, 2]),
    (PROMPT, [7]),
]


def plainly(model: torch.nn.Module, question: Question) -> float:
    before, answer = question
    ids = torch.tensor([[*before, *answer]])
    with torch.no_grad():
        logps = model(input_ids=ids).logits.float().log_softmax(-1)[0, len(before) - 1 : -1]
    return float(logps.gather(1, torch.tensor(answer)[:, None]).mean())


@pytest.mark.property
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 100, 10_000])
def test_they_are_the_models_own(share: bool, max_tokens: int) -> None:
    model = tiny_qwen3()
    wanted = [plainly(model, one) for one in QUESTIONS]
    add_fused_head(model)
    model.train()
    found = mean_answer_logps(model, QUESTIONS, max_tokens=max_tokens, share=share)
    assert found == pytest.approx(wanted, abs=2e-5)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_nothing_asked_is_nothing_answered() -> None:
    assert mean_answer_logps(tiny_qwen3(), [], max_tokens=10) == []
