"""How probable an answer is behind the beginnings of episodes: one pass without gradient.

The questions of a batch are short branches of one prefix tree: what two of them have in common,
a prompt or the turns of one episode, is read once. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from toolgrpo.shared_pass.packing import Row, pack_in_passes
from toolgrpo.shared_pass.scoring import forward_packing, unsupported_model

__all__ = ["Question", "mean_answer_logps"]

Question = tuple[Sequence[int], Sequence[int]]
"""The tokens before an answer, at least one, and the answer's own, at least one."""


def mean_answer_logps(
    unwrapped: Any,
    questions: Sequence[Question],
    *,
    max_tokens: int,
    share: bool = True,
    autocast: AbstractContextManager[Any] | None = None,
) -> list[float]:
    """Return the mean log-probability of the tokens of each answer.

    `unwrapped` is the transformers or PEFT model, with TRL's fused LM head. A forward pass has at
    most `max_tokens` tokens, unless one question alone has more.
    """
    if not questions:
        return []
    shared = share and unsupported_model(unwrapped) is None
    with torch.no_grad(), _evaluating(unwrapped), autocast or nullcontext():
        score = _shared if shared else _padded
        sums = score(unwrapped, questions, max_tokens)
    return [float(total) / len(answer) for total, (_, answer) in zip(sums, questions, strict=True)]


def _shared(model: Any, questions: Sequence[Question], max_tokens: int) -> np.ndarray[Any, Any]:
    sums = np.zeros(len(questions))
    config = model.config.get_text_config()
    for packing in pack_in_passes([_row(*one) for one in enumerate(questions)], max_tokens):
        logps, _ = forward_packing(model, config, packing, model.device)
        np.add.at(sums, packing.rows, logps.double().cpu().numpy())
    return sums


def _row(index: int, question: Question) -> Row:
    before, answer = question
    tokens = np.array([*before, *answer[:-1]], np.int64)
    labels = np.full(len(tokens), -100, np.int64)
    labels[len(before) - 1 :] = answer
    return Row(index, tokens, labels, np.arange(len(tokens)))


def _padded(model: Any, questions: Sequence[Question], max_tokens: int) -> np.ndarray[Any, Any]:
    rows = sorted((_row(*one) for one in enumerate(questions)), key=lambda row: len(row.tokens))
    sums = np.zeros(len(questions))
    start = 0
    while start < len(rows):
        end = start + 1
        while end < len(rows) and (end + 1 - start) * len(rows[end].tokens) <= max_tokens:
            end += 1
        some, start = rows[start:end], end
        width = len(some[-1].tokens)
        tokens, labels = np.zeros((len(some), width), np.int64), np.full((len(some), width), -100, np.int64)
        for place, row in enumerate(some):
            tokens[place, : len(row.tokens)], labels[place, : len(row.tokens)] = row.tokens, row.labels
        real = np.array([[n < len(row.tokens) for n in range(width)] for row in some], np.int64)
        output = model(
            input_ids=torch.from_numpy(tokens).to(model.device),
            attention_mask=torch.from_numpy(real).to(model.device),
            shift_labels=torch.from_numpy(labels).to(model.device),
            fused_lm_head=True,
        )
        logps = output.log_probs.double().cpu().numpy()
        for place, row in enumerate(some):
            sums[row.index] = logps[place][labels[place] != -100].sum()
    return sums


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Leave dropout out in the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
