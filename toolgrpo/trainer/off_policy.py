"""The correction for off-policy tokens in the life of a batch, and what is said of it.

    expect       the engine's log-probabilities, before TRL scores the batch
    old_policy   in place of a pass of TRL that is not needed
    applied      the batch with its weights
    without_masked
    heard        what the loss of a micro-batch weighted, where it is known only there

Invariants: every process gathers as often as the others; a batch is measured once, by its first pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.rollout.batch import Mode
from toolgrpo.signal.correction import Correction, EpisodeWeights, difference_metrics, weight_metrics
from toolgrpo.trainer import trl_correction


class OffPolicy:
    """One trainer's, which is only handed on to TRL's seams.

    `cut_by` names what cuts the distribution that the engine draws from; `warn` says a sentence once.
    """

    def __init__(
        self,
        trainer: Any,
        correction: Correction,
        *,
        micro_batches: int,
        cut_by: str | None,
        log: Callable[[Mapping[str, float]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._correction = correction
        self._micro_batches = micro_batches
        self._cut_by = cut_by
        self._log = log
        self._warn = warn
        self._engine_logps: Sequence[Sequence[float]] | None = None  # until TRL asks for the old policy's
        self._left = 0  # micro-batches of this batch that are still to be measured
        self._weights: list[EpisodeWeights] = []

    @property
    def skips_old_policy(self) -> bool:
        return self._correction.method == "bypass"

    def expect(self, engine_logps: Sequence[Sequence[float]] | None) -> None:
        """Take the engine's log-probabilities of a new batch."""
        wanted = self.skips_old_policy and trl_correction.reads_old_policy_anyway(self._trainer)
        self._engine_logps = engine_logps if wanted else None

    def old_policy(self, input_ids: torch.Tensor, width: int) -> torch.Tensor | None:
        """Return, once, what stands for the old policy's log-probabilities; None: the pass is to be made."""
        rows, self._engine_logps = self._engine_logps, None
        if rows is None:
            return None
        logps = torch.zeros(len(rows), width, device=input_ids.device)
        for place, row in enumerate(rows):
            logps[place, : len(row)] = torch.tensor(row)
        return logps

    def applied(self, batch: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Return the batch that TRL has scored, with the weights of this correction."""
        self._engine_logps = None
        if self._correction.method == "bypass":
            batch = trl_correction.with_engine_as_old_policy(batch)
            if mode == "train":
                self._weights, self._left = [], self._micro_batches
            return batch
        if self._correction.method == "geo_tis":
            batch = trl_correction.with_kept_episodes(batch, self._correction.rule, self._correction.cap)
        if mode == "train" and self._correction.method != "off":
            self._tell(trl_correction.weights_of_batch(batch))
        return batch

    def without_masked(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with nothing to learn from the episodes that were left out."""
        return trl_correction.without_masked(batch) if self._correction.method == "geo_tis" else batch

    def heard(self, inputs: dict[str, Any], logps: torch.Tensor | None, live: torch.Tensor | None) -> None:
        """Measure a micro-batch by the log-probabilities of its own pass; with the last one, tell of all."""
        if not self._left:
            return
        if logps is not None and "old_per_token_logps" in inputs:
            self._weights += trl_correction.weights_in_loss(self._trainer, inputs, logps, live)
        self._left -= 1
        if not self._left:
            own, self._weights = self._weights, []
            self._tell(own)

    def _tell(self, own: list[EpisodeWeights]) -> None:
        episodes = gather_object(own)
        self._log(weight_metrics(episodes))
        if self.skips_old_policy:  # else TRL has logged it
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
