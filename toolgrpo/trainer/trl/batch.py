"""Batches as TRL hands them from one of its calls to the next, and readers of them. Tested with TRL 1.16.0.

Functions translate, without a trainer. Two watch the passes over a batch: `OffPolicy` says how far engine and trainer are
apart, and `TokenTap` tells the recorder what a few episodes' tokens gave.

What is private and used (`tests/trainer/test_trl_correction.py` fails with a sentence when one of these changes):

* `_generate` returns (prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields,
  images, tool_images), columns with an episode a row;
* `_generate_and_score_completions` returns a dict of a generation batch, in the order of `_generate`,
  and `_compute_loss` reads the same keys of a micro-batch: `advantages`, (B,) or (B, T), `completion_mask`,
  `tool_mask`, `prompt_mask`, `num_items_in_batch`, `old_per_token_logps`, `sampling_per_token_logps`,
  `importance_sampling_ratio`; what is added (`episode_numbers`, `segment_prompts`) is shuffled and cut with
  the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.learning.correction import Correction, EpisodeWeights, cut_by, difference_metrics, weight_metrics
from toolgrpo.learning.stages import TrainBatch, is_live
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.training_pass import Scores, SegmentedRows

Batch = dict[str, Any]


def as_trl(trajectories: Sequence[Trajectory], pad_id: int) -> tuple[Any, ...]:
    """Return episodes as `_generate` does.

    TRL wants at least one token per completion, so an empty one gets a pad token that is not trained on.
    The messages are copies: a reward function that changes them changes no trajectory.
    """
    with_logprobs = all(one.has_logprobs for one in trajectories)
    return (
        [list(one.prompt_ids) for one in trajectories],
        [list(one.ids) or [pad_id] for one in trajectories],
        [list(one.mask) or [0] for one in trajectories],
        [one.completion() for one in trajectories],
        engine_logps(trajectories) if with_logprobs else None,
        {"trajectories": list(trajectories)},
        None,
        [],
    )


def as_rollout_func(trajectories: Sequence[Trajectory], pad_id: int) -> dict[str, Any]:
    """Return episodes as a `rollout_func` of TRL's does."""
    prompt_ids, ids, mask, _, logps, extra, *_ = as_trl(trajectories, pad_id)
    mask = [[0] * len(of) if one.dropped is not None else of for one, of in zip(trajectories, mask, strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "env_mask": mask, "logprobs": logps, **extra}


def engine_logps(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """Return the engine's log-probabilities; TRL masks context tokens, and wants a number there."""
    return [[0.0 if lp is None else lp for lp in one.logprobs] or [0.0] for one in trajectories]


def train_batch(output: Batch) -> TrainBatch:
    """Return what TRL made of a generation batch."""
    return TrainBatch(
        advantages=output["advantages"],
        mask=loss_mask(output),
        n_read=output["prompt_mask"].sum(dim=1) + output["completion_mask"].sum(dim=1),
        denominator=output["num_items_in_batch"],
        old_logps=output.get("old_per_token_logps"),
        engine_logps=output.get("sampling_per_token_logps"),
        weights=output.get("importance_sampling_ratio"),
    )


def with_train_batch(
    output: Batch, before: TrainBatch, after: TrainBatch, segments: SegmentedRows | None = None
) -> Batch:
    """Return TRL's batch with what the stages have changed, and where segments begin in its rows, if they do anywhere."""
    changed = {**output, "advantages": after.advantages, "num_items_in_batch": after.denominator}
    # not `completion_mask`: the pass reads the tokens that it names, also those that are not trained on
    if after.mask is not before.mask:
        changed["tool_mask"] = after.mask
    if after.old_logps is not None:
        changed["old_per_token_logps"] = after.old_logps
    if after.weights is not None:
        changed["importance_sampling_ratio"] = after.weights
    return changed if segments is None else {**changed, "segment_prompts": segments.n_prompts}


def advantages_of(batch: TrainBatch) -> list[float]:
    """Return the advantage of each episode; the mean over its trained tokens where they have their own."""
    advantages = batch.advantages
    if advantages.dim() > 1:
        advantages = (advantages * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)
    return [float(value) for value in advantages.tolist()]


def tokens_of_row(
    inputs: Mapping[str, Any], row: int, logps: torch.Tensor, entropies: torch.Tensor | None, mask: Sequence[int]
) -> dict[str, list[float | None] | None]:
    """Return what a pass gave for the tokens of one episode; None for those that were not sampled."""

    def own(values: torch.Tensor | None) -> list[float | None] | None:
        if values is None:
            return None
        given = values[row].detach().float().expand(len(mask)) if values.shape[1] == 1 else values[row].detach().float()
        return [round(value, 8) if m else None for value, m in zip(given[: len(mask)].tolist(), mask, strict=True)]

    advantages = inputs["advantages"]
    return {
        "trainer_logprobs": own(logps),
        "entropy": own(entropies),
        "correction": own(inputs.get("importance_sampling_ratio")),
        "advantage": own(advantages) if advantages.dim() > 1 else None,
    }


def live(batch: Mapping[str, Any]) -> torch.Tensor:
    return is_live(batch["advantages"], loss_mask(batch))


def loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


class OffPolicy:
    """Messages and metrics about off-policy tokens: how far engine and trainer are apart, and what the correction weights.

    With `bypass` only the loss of each micro-batch knows its weights (`heard`); with the others the stages of
    the batch do (`told`). `warn` says a sentence once.
    """

    def __init__(
        self,
        correction: Correction,
        args: ToolGRPOConfig,
        *,
        log: Callable[[Mapping[str, float]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._correction = correction
        self._micro_batches = args.steps_per_generation
        self._cut_by = cut_by(args.sampling_options())  # what cuts the distribution that the engine draws from
        self._log = log
        self._warn = warn
        self._left = 0  # micro-batches of this batch that are still to be measured
        self._weights: list[EpisodeWeights] = []

    @property
    def is_bypass(self) -> bool:
        """Return whether the engine stands for the old policy."""
        return self._correction.method == "bypass"

    def state(self) -> list[Any]:
        """Return what a resume needs to go on in the middle of a batch."""
        return [self._left, [astuple(one) for one in self._weights]]

    def restore(self, state: Sequence[Any]) -> None:
        self._left, self._weights = state[0], [EpisodeWeights(*one) for one in state[1]]

    def told(self, weighted: Sequence[EpisodeWeights]) -> None:
        """Tell what the correction does to a new training batch, or wait for its loss."""
        if self.is_bypass:
            self._weights, self._left = [], self._micro_batches
        elif self._correction.method != "off":
            self._tell(list(weighted))

    def heard(self, weighted: Callable[[], list[EpisodeWeights]]) -> None:
        """Measure a micro-batch by its own pass; with the last one, tell of all."""
        if not self._left:
            return
        self._weights += weighted()
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
            f"{self._cut_by} biases rollout_correction {self._correction.method}: the engine samples "
            f"from a cut distribution, and the trainer's log-probabilities are {-bias:.3g} a token below its own, the logarithm of "
            f"what is cut off; so a token is weighted by {math.exp(bias):.3g}, and the {longest} tokens of the longest "
            f"episode together by e^{bias * longest:.3g}. Leave top_p, top_k, min_p and repetition_penalty off in training, or set "
            f"rollout_correction off"
        )
        self._cut_by = None


class TokenTap:
    """Tell the recorder what the training pass saw of a few episodes' tokens.

    Of each rollout `n` episodes are chosen, in turn the one with the most positive and the one with the
    most negative advantage. Their numbers travel with TRL's batch through its shuffling and splitting
    (`episode_numbers`), and are met again in the pass that makes the loss. Nothing is drawn at
    random, and nothing that is trained on changes.
    """

    def __init__(self, recorder: EpisodeRecorder, n: int) -> None:
        self._recorder = recorder
        self._n = n if recorder.path is not None else 0
        self._chosen: dict[int, Scored] = {}
        self._chosen_at = 0  # a step

    def mark(self, output: dict[str, Any], numbers: Sequence[int]) -> None:
        """Mark TRL's rows with the numbers of their episodes."""
        if self._n:
            output["episode_numbers"] = torch.tensor(numbers, device=output["completion_ids"].device)

    def choose(self, batch: RolloutBatch) -> None:
        """Choose among the episodes of a rollout."""
        if self._n == 0:
            return
        self._chosen_at = batch.step
        recorded = [
            one
            for place, one in enumerate(batch.episodes)
            if one.trajectory.ids and self._recorder.records(batch, place)
        ]
        chosen = chosen_episodes(recorded, self._n)
        self._chosen = {one.trajectory.metadata["episode"]: one for one in chosen}

    def hear(self, inputs: Mapping[str, Any], scored: Scores, read: torch.Tensor | None) -> None:
        """Record, once, what the pass over a micro-batch gave for the chosen episodes, of the rows that it read."""
        if not self._chosen:  # else the rows of this batch are marked
            return
        logps, entropies, _ = scored
        for row, number in enumerate(inputs["episode_numbers"].tolist()):
            episode = self._chosen.pop(number, None)
            if episode is not None and (read is None or read[row]):
                seen = tokens_of_row(inputs, row, logps, entropies, episode.trajectory.mask)
                line = {"step": self._chosen_at, "episode": number, **seen}
                self._recorder.tokens_seen(line, list(episode.trajectory.ids))


def chosen_episodes(episodes: Sequence[Scored], n: int) -> list[Scored]:
    """Return up to `n` episodes, in turn the most positive and the most negative advantage."""
    ordered = sorted((one for one in episodes if one.advantage), key=lambda one: one.advantage or 0.0)
    last = len(ordered) - 1
    return [ordered[last - place // 2 if place % 2 == 0 else place // 2] for place in range(min(n, len(ordered)))]
