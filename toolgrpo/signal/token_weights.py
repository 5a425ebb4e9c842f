"""How much off-policy tokens count, and what that does to a batch: pure functions of tensors.

A ratio is the trainer's probability of a token over the engine's. Shapes are (B, T); tokens outside
the mask have the log-ratio 0, and so have those that nobody could score (NaN), as with TRL.

`weight_metrics` shows the trap of sequence weights: all of it stands there by quartile of length, q1
the shortest episodes and q4 the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolgrpo.signal.correction import EpisodeRule


@dataclass(frozen=True, slots=True)
class EpisodeWeights:
    """Sums over the trained tokens of one episode."""

    n_tokens: int
    n_masked: int  # whose weight is 0
    weight: float
    squared_weight: float
    log_ratio: float
    k3: float
    difference: float  # of log-probabilities, absolute
    largest_difference: float = 0.0


def log_ratios(trainer_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num((trainer_logps - engine_logps) * mask, nan=0.0)


def truncated(log_ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """Return each token's ratio, and `cap` where it is larger."""
    return log_ratio.clamp(max=math.log(cap)).exp()


def clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return what PPO's clip leaves of each token's ratio: 0 beyond `1 - low` and `1 + high`, where the
    advantage pushes further.
    """
    per_token = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    ratio = log_ratio.exp()
    beyond = ((ratio > 1 + high) & (per_token > 0)) | ((ratio < 1 - low) & (per_token < 0))
    return ratio.masked_fill(beyond, 0.0)


def kept(log_ratio: torch.Tensor, mask: torch.Tensor, rule: EpisodeRule) -> torch.Tensor:
    """Return for each row, (B,), whether the rule keeps it; a row without a token is kept."""
    n_tokens = mask.sum(dim=1).clamp(min=1)
    mean = (log_ratio * mask).sum(dim=1) / n_tokens
    wider = (rule.band_tokens / n_tokens).clamp(min=1.0).sqrt()
    return (math.log(rule.low) * wider <= mean) & (mean <= math.log(rule.high) * wider)


def weights_of_rows(log_ratio: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> list[EpisodeWeights]:
    """Return the sums of each row; `weights` are (B, T), or (B, 1) where an episode has one."""
    log_ratio, weights = log_ratio.float(), weights.float().expand(mask.shape)
    sums = torch.stack(
        [
            mask.sum(dim=1).float(),
            ((weights == 0) * mask).sum(dim=1).float(),
            (weights * mask).sum(dim=1),
            (weights.square() * mask).sum(dim=1),
            (log_ratio * mask).sum(dim=1),
            (_k3(log_ratio) * mask).sum(dim=1),
            (log_ratio.abs() * mask).sum(dim=1),
            (log_ratio.abs() * mask).amax(dim=1),
        ],
        dim=1,
    )
    return [EpisodeWeights(int(n), int(masked), *rest) for n, masked, *rest in sums.tolist()]


def weight_metrics(episodes: Sequence[EpisodeWeights]) -> dict[str, float]:
    """Return the metrics of a batch: of all its episodes, and of each quarter by length (`q1` to `q4`)."""
    by_length = sorted((one for one in episodes if one.n_tokens), key=lambda one: one.n_tokens)
    if not by_length:
        return {}
    metrics = {f"correction/{name}": value for name, value in _sums(by_length).items()}
    n = len(by_length)
    for quarter in range(4):
        own = by_length[quarter * n // 4 : (quarter + 1) * n // 4]
        if own:
            metrics.update({f"correction/{name}/q{quarter + 1}": value for name, value in _sums(own).items()})
    return metrics


def difference_metrics(episodes: Sequence[EpisodeWeights]) -> dict[str, float]:
    """Return how far engine and trainer are apart, under the names that TRL has for it where it looks."""
    n_tokens = sum(one.n_tokens for one in episodes)
    if not n_tokens:
        return {}
    name = "sampling/sampling_logp_difference"
    return {
        f"{name}/mean": sum(one.difference for one in episodes) / n_tokens,
        f"{name}/max": max(one.largest_difference for one in episodes),
    }


def _sums(episodes: Sequence[EpisodeWeights]) -> dict[str, float]:
    n_tokens = sum(one.n_tokens for one in episodes)
    squared = sum(one.squared_weight for one in episodes)
    weight = sum(one.weight for one in episodes)
    return {
        "masked_episodes": sum(one.n_masked == one.n_tokens for one in episodes) / len(episodes),
        "masked_tokens": sum(one.n_masked for one in episodes) / n_tokens,
        "ess": weight * weight / (n_tokens * squared) if squared else 0.0,
        "k3": sum(one.k3 for one in episodes) / n_tokens,
    }


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.expm1(log_ratio) - log_ratio
