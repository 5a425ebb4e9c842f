"""Messages and metrics about off-policy tokens: how far engine and trainer are apart, and what the correction weights.

With `bypass` only the loss of each micro-batch knows its weights (`heard`); with the others the stages of
the batch do (`told`).

Invariants: every process gathers as often as the others; a batch is measured once, by its first pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.learning.correction import Correction, EpisodeWeights, difference_metrics, weight_metrics
from toolgrpo.trainer.trl import batch as trl_batch


class OffPolicy:
    """One run's. `cut_by` names what cuts the distribution that the engine draws from; `warn` says a sentence once."""

    def __init__(
        self,
        correction: Correction,
        *,
        micro_batches: int,
        cut_by: str | None,
        log: Callable[[Mapping[str, float]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._correction = correction
        self._micro_batches = micro_batches
        self._cut_by = cut_by
        self._log = log
        self._warn = warn
        self._left = 0  # micro-batches of this batch that are still to be measured
        self._weights: list[EpisodeWeights] = []

    @property
    def is_bypass(self) -> bool:
        """Return whether the engine stands for the old policy."""
        return self._correction.method == "bypass"

    def told(self, weighted: Sequence[EpisodeWeights]) -> None:
        """Tell what the correction does to a new training batch, or wait for its loss."""
        if self.is_bypass:
            self._weights, self._left = [], self._micro_batches
        elif self._correction.method != "off":
            self._tell(list(weighted))

    def heard(
        self, trainer: Any, inputs: dict[str, Any], logps: torch.Tensor | None, live: torch.Tensor | None
    ) -> None:
        """Measure a micro-batch by the log-probabilities of its own pass; with the last one, tell of all."""
        if not self._left:
            return
        if logps is not None and "old_per_token_logps" in inputs:
            self._weights += trl_batch.weights_in_loss(trainer, inputs, logps, live)
        self._left -= 1
        if not self._left:
            own, self._weights = self._weights, []
            self._tell(own)

    def _tell(self, own: list[EpisodeWeights]) -> None:
        episodes = gather_object(own)
        self._log(weight_metrics(episodes))
        if self.is_bypass:  # else TRL has logged it
            self._log(difference_metrics(episodes))
        n_tokens = sum(one.n_tokens for one in episodes)
        if self._cut_by is None or not n_tokens:
            return
        bias = sum(one.log_ratio for one in episodes) / n_tokens
        longest = max(one.n_tokens for one in episodes)
        self._warn(
            f"{self._cut_by} biases rollout_correction {self._correction.method}: the engine draws from a cut "
            f"distribution, and the trainer's log-probabilities are {-bias:.3g} a token below its own, the logarithm of "
            f"what is cut off; so a token is weighted by {math.exp(bias):.3g}, and the {longest} tokens of the longest "
            f"episode together by e^{bias * longest:.3g}. Leave top_p, top_k and min_p off in training, or set "
            f"rollout_correction off"
        )
        self._cut_by = None
