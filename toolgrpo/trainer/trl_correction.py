"""TRL's correction for off-policy tokens, and what ours changes in its batches.

One more of the files that know TRL's trainer from inside (`tests/trainer/test_trl_correction.py`
fails with a sentence when one of these changes):

* `use_vllm` and `vllm_importance_sampling_correction`, both true, let TRL read a batch with the old
  policy, weight its tokens, and give `importance_sampling_ratio`, (B, 1) or (B, T), by which its loss
  is multiplied; with one of them false `_compute_loss` knows no such weight;
* `vllm_importance_sampling_mode`, `..._clip_max` and `..._clip_min` are attributes of the trainer,
  and `token_truncate` is the ratio of each token, cut at the largest;
* without that correction TRL still reads the old policy where the micro-batches of a batch differ in
  their weights: it is the first forward pass of `_generate_and_score_completions`;
* the loss's ratio is the policy's over `old_per_token_logps`, and the policy's own where there are
  none; `sampling_per_token_logps` are the engine's, (B, T), in every batch whose engine gave some;
* the losses of `_CLIPPED` leave a token out beyond `epsilon_low` and `epsilon_high`.
"""

from __future__ import annotations

from typing import Any

import torch

from toolgrpo.signal.correction import (
    Correction,
    EpisodeRule,
    EpisodeWeights,
    clipped,
    kept,
    log_ratios,
    truncated,
    weights_of_rows,
)

Batch = dict[str, Any]
_CLIPPED = frozenset(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"))


def correct_by(trainer: Any, correction: Correction) -> None:
    """Let TRL do its part of a correction, or none."""
    trainer.use_vllm = correction.method in ("trl", "geo_tis")
    if correction.method == "geo_tis":
        trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.vllm_importance_sampling_clip_max = correction.cap
        trainer.vllm_importance_sampling_clip_min = None


def reads_old_policy_anyway(trainer: Any) -> bool:
    """Return whether TRL reads a batch with the old policy though it corrects nothing."""
    args = trainer.args
    return bool(args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations))


def with_engine_as_old_policy(batch: Batch) -> Batch:
    """Return the batch with the engine's log-probabilities for the old policy's (bypass)."""
    if "sampling_per_token_logps" not in batch:
        return batch
    return {**batch, "old_per_token_logps": batch["sampling_per_token_logps"]}


def with_kept_episodes(batch: Batch, rule: EpisodeRule, cap: float) -> Batch:
    """Return the batch with the weights of `geo_tis`: 0 in episodes that the rule leaves out."""
    mask = _loss_mask(batch)
    log_ratio = log_ratios(batch["old_per_token_logps"], batch["sampling_per_token_logps"], mask)
    weights = truncated(log_ratio, cap) * kept(log_ratio, mask, rule).unsqueeze(1)
    return {**batch, "importance_sampling_ratio": weights}


def without_masked(batch: Batch) -> Batch:
    """Return the batch with no advantage in episodes whose weights are all 0: so they are no live rows,
    and no loss has them by another way.
    """
    weights = batch.get("importance_sampling_ratio")
    if weights is None:
        return batch
    counts = ((weights != 0) & (_loss_mask(batch) != 0)).any(dim=1)
    advantages = batch["advantages"]
    masked = ~counts if advantages.dim() == 1 else ~counts.unsqueeze(1)
    return {**batch, "advantages": advantages.masked_fill(masked, 0.0)}


def weights_of_batch(batch: Batch) -> list[EpisodeWeights]:
    """Return how TRL's loss will weight the episodes that the old policy has read."""
    if "importance_sampling_ratio" not in batch:
        return []
    mask = _loss_mask(batch)
    old = batch["old_per_token_logps"]
    read = ~old.isnan().all(dim=1)
    log_ratio = log_ratios(old, batch["sampling_per_token_logps"], mask)[read]
    weights = batch["importance_sampling_ratio"]
    return weights_of_rows(log_ratio, weights[read], mask[read])


def weights_in_loss(
    trainer: Any, inputs: Batch, logps: torch.Tensor, live: torch.Tensor | None
) -> list[EpisodeWeights]:
    """Return how the loss weights the episodes of a micro-batch whose old policy is the engine."""
    mask = _loss_mask(inputs)
    log_ratio = log_ratios(logps.detach(), inputs["old_per_token_logps"], mask)
    weights, advantages = log_ratio.exp(), inputs["advantages"]
    if trainer.importance_sampling_level == "sequence":
        mean = (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        weights, used = mean.exp().expand_as(log_ratio), mean.expand_as(log_ratio)
    else:
        used = log_ratio
    if trainer.loss_type in _CLIPPED:
        weights = clipped(used, advantages, trainer.epsilon_low, trainer.epsilon_high)
    if live is not None:
        log_ratio, weights, mask = log_ratio[live], weights[live], mask[live]
    return weights_of_rows(log_ratio, weights, mask)


def _loss_mask(batch: Batch) -> torch.Tensor:
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
