"""What is done about tokens that another policy drew than the one that is trained: the fields of a
config, and the frozen value they make.

An engine computes the same model with other kernels or in bf16, or has the weights of an earlier
step. TRL weights an episode by the product of its tokens' ratios (trainer over engine) and leaves it
out above 3: over 2,000 tokens that differ by .015 each, that is a random number between .26 and 3.8.
`bypass` and `geo_tis` have no such product (`token_weights.py`).

Invariant: where the engine's numbers are the trainer's own, nothing is corrected, whatever is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.errors import ConfigError

METHODS = ("auto", "trl", "bypass", "geo_tis", "off")
_FIELDS_OF_TRL = {  # and their defaults
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRule:
    """Which episodes `geo_tis` keeps: those whose geometric mean of the ratios is in a band.

    The band is that of an episode of `band_tokens` tokens or more. The mean over fewer tokens
    scatters more by chance alone, and its band is wider by the same factor.
    """

    low: float = 0.999
    high: float = 1.001
    band_tokens: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a run does: one of METHODS but auto, and why."""

    method: str
    why: str
    rule: EpisodeRule = EpisodeRule()
    cap: float = 2.0  # the largest weight of a token, with geo_tis

    @property
    def line(self) -> str:
        """Say it in one line."""
        return f"{self.method} ({self.why})"


@dataclass
class CorrectionOptions:
    """Fields of a config that say how off-policy tokens are weighted."""

    rollout_correction: str = field(
        default="auto",
        metadata={
            "help": "Tokens that the engine drew with other log-probabilities than the trainer's: bypass (the engine's are "
            "the old policy's, and PPO's clip holds the ratio), geo_tis (episodes near the trainer's policy count, their "
            "tokens by the truncated ratio), trl (TRL's own), off; auto: bypass where a batch gets one update, else "
            "geo_tis, and trl where its fields are set.",
            "choices": METHODS,
        },
    )
    correction_band: list[float] = field(
        default_factory=lambda: [0.999, 1.001],
        metadata={
            "help": "With geo_tis: the band for the geometric mean of an episode's ratios, from 1,000 tokens on; of n "
            "tokens fewer it is wider by the square root of 1,000 over n."
        },
    )

    def check_correction(self) -> None:
        """Refuse values that mean nothing, and fields of TRL that nothing would read."""
        if self.rollout_correction not in METHODS:
            raise ConfigError(
                f"rollout_correction must be one of {', '.join(METHODS)}; got {self.rollout_correction!r}"
            )
        band = self.correction_band
        if len(band) != 2 or not 0 < band[0] <= 1 <= band[1] < math.inf:
            raise ConfigError(
                f"correction_band must be two numbers around 1, the lowest and the highest mean ratio that counts, such "
                f"as 0.999 1.001; got {band}"
            )
        own = _set_fields_of_trl(self)
        if own and self.rollout_correction in ("bypass", "geo_tis", "off"):
            raise ConfigError(
                f"{own[0]} belongs to TRL's own correction, but rollout_correction is {self.rollout_correction}; leave "
                f"one of the two out"
            )


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
    own = _set_fields_of_trl(args)
    if own:
        return "trl", f"{own[0]} is set"
    if _updates_are_several(args):
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
    return None


def _updates_are_several(args: Any) -> bool:
    """Return whether weights change between the first and the last micro-batch of a batch, as TRL asks it."""
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations))


def _set_fields_of_trl(args: Any) -> list[str]:
    return [name for name, default in _FIELDS_OF_TRL.items() if getattr(args, name, default) != default]
