"""Correction for tokens that another policy sampled: one
frozen value.

An engine computes the same model with other kernels or in bf16, or has the weights of an earlier
step. TRL weights an episode by the product of its tokens' ratios (trainer over engine) and leaves it
out above 3: over 2,000 tokens that differ by .015 each, that is a random number between .26 and 3.8.
`bypass` and `geo_tis` have no such product (`correction.py`).

Invariant: where the engine's numbers are the trainer's own (in float32), nothing is corrected, whatever is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolgrpo.engines.base import SamplingOptions

_FIELDS_OF_TRL = {  # and their defaults
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}


# How much off-policy tokens count, and what that does to a batch: pure functions of tensors.
#
# A ratio is the trainer's probability of a token over the engine's. Shapes are (B, T); tokens outside
# the mask have the log-ratio 0, and so have those that nobody could score (NaN), as with TRL.
#
# `weight_metrics` shows the trap of sequence weights: all of it stands there by quartile of length, q1
# the shortest episodes and q4 the longest.


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
            ((torch.expm1(log_ratio) - log_ratio) * mask).sum(dim=1),  # k3
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRule:
    """Episodes that `geo_tis` keeps: those whose geometric mean of the ratios is in a band.

    The band is that of an episode of `band_tokens` tokens or more. The mean over fewer tokens
    scatters more by chance alone, and its band is wider by the same factor.
    """

    low: float = 0.999
    high: float = 1.001
    band_tokens: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Correction of a run: one of `rollout_correction` but auto, and why."""

    method: str
    why: str
    rule: EpisodeRule = EpisodeRule()
    cap: float = 2.0  # the largest weight of a token, with geo_tis

    @property
    def line(self) -> str:
        """Say it in one line."""
        return f"{self.method} ({self.why})"


def settled(args: Any, *, gives_logprobs: bool, same_numbers: bool) -> Correction:
    """Return what a run with this config and an engine of this kind does."""
    rule = EpisodeRule(low=args.correction_band[0], high=args.correction_band[1])
    method, why = _method(args, gives_logprobs=gives_logprobs, same_numbers=same_numbers)
    return Correction(method=method, why=why, rule=rule)


def _method(args: Any, *, gives_logprobs: bool, same_numbers: bool) -> tuple[str, str]:
    wanted = args.rollout_correction
    if not gives_logprobs:
        return "off", "the engine gives no log-probabilities"
    if same_numbers:
        return "off", "the engine's numbers are the trainer's own"
    if wanted != "auto":
        return wanted, "as asked"
    if not args.vllm_importance_sampling_correction:
        return "off", "vllm_importance_sampling_correction is false"
    own = set_fields_of_trl(args)
    if own:
        return "trl", f"{own[0]} is set"
    if args.importance_sampling_level == "sequence":
        return "geo_tis", "the clip of whole episodes is narrower than the effect of rounding on their ratio"
    if updates_are_several(args):
        return "geo_tis", "a batch gets several updates, so the clip holds the ratio to the policy before the first"
    return "bypass", "a batch gets one update, so the clip can hold the ratio to the engine itself"


def cut_by(options: SamplingOptions) -> str | None:
    """Return what makes the engine draw from another distribution than the model's, if anything."""
    if options.top_p < 1:
        return f"top_p {options.top_p:g}"
    if options.top_k > 0:
        return f"top_k {options.top_k}"
    if options.min_p > 0:
        return f"min_p {options.min_p:g}"
    if options.repetition_penalty != 1:
        return f"repetition_penalty {options.repetition_penalty:g}"
    return None


def updates_are_several(args: Any) -> bool:
    """Return whether weights change between the first and the last micro-batch of a batch, as TRL asks it."""
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations))


def set_fields_of_trl(args: Any) -> list[str]:
    """Return the fields of TRL's own correction that were given another value than the default."""
    return [name for name, default in _FIELDS_OF_TRL.items() if getattr(args, name, default) != default]
