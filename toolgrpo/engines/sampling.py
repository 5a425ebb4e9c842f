"""Draw the next token from logits, and say how likely it was.

The log-probability is that of the distribution drawn from, after penalty, temperature, min_p, top_k
and top_p, in this order: what vLLM calls processed log-probabilities, and what TRL's
importance-sampling correction compares with its own log-softmax(logits / temperature). Greedy
drawing (temperature 0) is not scaled by a temperature.

Pure functions of tensors; everything is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolgrpo.engines.base import SamplingOptions

_GREEDY_BELOW = 1e-5  # vLLM's own bound


@dataclass(frozen=True, slots=True)
class Drawn:
    tokens: list[int]
    logprobs: list[float]


def draw(
    logits_BV: torch.Tensor,
    options: SamplingOptions,
    seen_ids: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
) -> Drawn:
    """Draw one token per row.

    `seen_ids` (all ids of a row so far) matter for the repetition penalty only.
    """
    logprobs_BV = processed_logprobs(logits_BV.float(), options, seen_ids)
    if options.temperature < _GREEDY_BELOW:
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        tokens_B = _exponential_race(logprobs_BV, generators)
    drawn_B = logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
    return Drawn(tokens_B.tolist(), drawn_B.tolist())


def processed_logprobs(
    logits_BV: torch.Tensor, options: SamplingOptions, seen_ids: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return log-probabilities of the distribution that `options` describe.

    Tokens that cannot be drawn have -inf.
    """
    if options.repetition_penalty != 1.0:
        logits_BV = _penalised(logits_BV, seen_ids, options.repetition_penalty)
    if options.temperature < _GREEDY_BELOW:
        return logits_BV.log_softmax(dim=-1)
    logits_BV = logits_BV / options.temperature
    if options.min_p > 0.0:
        probs_BV = logits_BV.softmax(dim=-1)
        too_small_BV = probs_BV < options.min_p * probs_BV.amax(dim=-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(too_small_BV, -torch.inf)
    if 0 < options.top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(options.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if options.top_p < 1.0:
        logits_BV = _nucleus(logits_BV, options.top_p)
    return logits_BV.log_softmax(dim=-1)


def _nucleus(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to at least `top_p`."""
    ascending = logits_BV.sort(dim=-1)
    below_BV = ascending.values.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    below_BV[:, -1] = False  # the most likely token always stays
    return logits_BV.masked_fill(below_BV.scatter(-1, ascending.indices, below_BV), -torch.inf)


def _penalised(logits_BV: torch.Tensor, seen_ids: Sequence[Sequence[int]], penalty: float) -> torch.Tensor:
    """Make every token that was seen less likely: positive logits divided,
    negative ones multiplied.
    """
    seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    for row, ids in enumerate(seen_ids):
        seen_BV[row, torch.tensor(list(ids), dtype=torch.long, device=logits_BV.device)] = True
    penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalised_BV, logits_BV)


def _exponential_race(logprobs_BV: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw from each row with its own generator:
    of waiting times with rates p the shortest is token i with p_i.
    """
    times_BV = torch.empty_like(logprobs_BV)
    for times_V, generator in zip(times_BV, generators, strict=True):
        times_V.exponential_(generator=generator)
    return (logprobs_BV.exp() / times_BV).argmax(dim=-1)
