"""Batches of TRL's trainer, from a rollout through its rewards to its loss. Tested with TRL 1.16.0.

What is private and used (`tests/trainer/test_trl_correction.py` and `test_trl_rewards.py` fail with a
sentence when one of these changes):

* `_generate` returns (prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields,
  images, tool_images), columns with an episode a row;
* `_generate_and_score_completions` returns a dict of a generation batch, in the order of `_generate`,
  and `_compute_loss` reads the same keys of a micro-batch: `advantages`, (B,) or (B, T), `completion_mask`,
  `tool_mask`, `prompt_mask`, `num_items_in_batch`, `old_per_token_logps`, `sampling_per_token_logps`,
  `importance_sampling_ratio`; what is added (`episode_numbers`, `segment_prompts`) is shuffled and cut with
  the others;
* it reads the old policy's log-probabilities before it asks for rewards, where the steps of a batch
  differ in their weights or the engine in its numbers: that is its first forward pass. There it takes NaN for
  a token that nobody could score, and leaves it out of `sampling/sampling_logp_difference`;
* `use_vllm` and `vllm_importance_sampling_correction`, both true, let it read a batch so, weight its
  tokens, and give `importance_sampling_ratio`, by which its loss is multiplied; with one of them false
  `_compute_loss` knows no such weight. `vllm_importance_sampling_mode`, `..._clip_max` and `..._clip_min` are
  attributes of the trainer, and `token_truncate` is the ratio of each token, cut at the largest;
* the loss's ratio is the policy's over `old_per_token_logps`, and the policy's own where there are none;
  the losses of `_CLIPPED` leave a token out beyond `epsilon_low` and `epsilon_high`;
* every loss is 0 for a row whose advantages are 0, in value and in gradient, unless one of
  `NEEDS_EVERY_ROW` or the load-balancing loss (`aux_loss_enabled`) is on, and homogeneous in the
  advantages: twice of them is twice the loss. Those of `LOSSES_BY_TOKEN` weigh each token by its own;
* `_compute_loss` appends to `_metrics["train"]["entropy"]` the mean over all tokens of the
  micro-batch, in all processes, and a NaN there is left out of the average;
* `GRPOTrainer._calculate_rewards(inputs, prompts, completions, completion_ids_list)` gives the rewards
  of all processes, an episode a row, a function a column; NaN where a function does not score it. A row
  with NaN alone leaves mean and standard deviation, and its advantage is 0;
* `GRPOTrainer._pending_extra_logs` and `_pending_metrics` collect what rewards log until the batch is
  scored;
* a reward model is asked about prompt and completion as one conversation, in the template of its own
  tokenizer (`reward_processing_classes`) with `chat_template_kwargs`, on the device where
  `Trainer._prepare_inputs` puts it; the first logit is the reward;
* `GRPOTrainer._metrics[mode]["reward"]` is the mean reward of what is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from trl import apply_chat_template

from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.learning.correction import (
    Correction,
    EpisodeWeights,
    clipped,
    log_ratios,
    updates_are_several,
    weights_of_rows,
)
from toolgrpo.learning.stages import (
    ROW_LOSSES,
    TOKEN_LOSSES,
    LearningRule,
    TrainBatch,
    is_live,
    why_every_row,
)
from toolgrpo.rollout.batch import Scored
from toolgrpo.rollout.row_parts import as_messages
from toolgrpo.trainer.batches import TakenBatch
from toolgrpo.trainer.pass_rows import RowChoice, SegmentedRows
from toolgrpo.trainer.trl.grpo import GRPOTrainer

Batch = dict[str, Any]
_CLIPPED = frozenset(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"))


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
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "env_mask": mask, "logprobs": logps, **extra}


def engine_logps(trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """Return the engine's log-probabilities; TRL masks context tokens, and wants a number there."""
    return [[0.0 if lp is None else lp for lp in one.logprobs] or [0.0] for one in trajectories]


def check_models(trainer: GRPOTrainer) -> None:
    """Raise if a reward model would have to be asked by one process alone, and cannot be."""
    has_model = any(isinstance(one, torch.nn.Module) for one in trainer.reward_funcs)
    if trainer.args.draws_groups and has_model and trainer.backend.splits_parameters:
        raise ConfigError(
            "dynamic_sampling asks rewards when a group ends, in each process for itself, but the "
            "reward model is split over the processes; use a reward function, or a backend that splits nothing"
        )


def ask_model(trainer: GRPOTrainer, number: int, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    """Return what a reward model says of these conversations."""
    model, tokenizer = trainer.reward_funcs[number], trainer.reward_processing_classes[number]
    whole = [{"messages": [*as_messages(p), *c]} for p, c in zip(prompts, completions, strict=True)]
    texts = [apply_chat_template(one, tokenizer, **trainer.chat_template_kwargs)["text"] for one in whole]
    inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        scores: list[float] = model(**Trainer._prepare_inputs(trainer, inputs)).logits[:, 0].float().tolist()
    return scores


def rewards_of_all(trainer: GRPOTrainer, taken: TakenBatch) -> torch.Tensor:
    """Return the rewards of the batches of all processes; what the rewards have logged goes to TRL with it."""
    for name, values in taken.answers.columns.items():
        trainer._pending_extra_logs[name].extend(values)
    for name, numbers in taken.answers.metrics.items():
        trainer._pending_metrics[name].extend(numbers)
    own = [
        (math.nan,) * len(values) if one.drop is not None else values
        for one, values in zip(taken.scored, taken.answers.values, strict=True)
    ]
    device = trainer.accelerator.device
    everything: torch.Tensor = trainer.accelerator.gather(torch.tensor(own, dtype=torch.float32, device=device))
    return everything


def log_drawn(trainer: GRPOTrainer, taken: TakenBatch) -> None:
    """Let `reward` be the mean of everything that was drawn; TRL's, of what is trained on, stands beside it."""
    if taken.metrics_of_all is None:
        return
    collected = trainer._metrics["train"]
    collected["reward_trained"].append(collected["reward"].pop())
    collected["reward"].append(taken.reward)
    for name, value in taken.metrics_of_all.items():
        collected[name].append(value)


def log_evaluation(trainer: GRPOTrainer, own: Sequence[Scored]) -> tuple[dict[str, float], int]:
    """Log success and rewards over the episodes of all processes, for TRL's next log; return them, and how many were scored."""
    shown = [(bool(one.success), {"reward": one.total, **_by_function(one)}) for one in own]
    of_all: list[tuple[bool, dict[str, float | None]]] = gather_object(shown)
    metrics = {"success": sum(success for success, _ in of_all) / max(1, len(of_all))}
    for name in dict.fromkeys(name for _, rewards in of_all for name in rewards):
        values = [value for _, rewards in of_all if (value := rewards.get(name)) is not None]
        metrics[name] = sum(values) / len(values) if values else math.nan
    trainer._metrics["eval"].update({name: [value] for name, value in metrics.items()})
    return metrics, len(of_all)


def _by_function(episode: Scored) -> dict[str, float | None]:
    return {f"rewards/{name}/mean": value for name, value in episode.rewards.items()}


def learning_rule(trainer: GRPOTrainer) -> LearningRule:
    """Return how this trainer learns from its batches."""
    args = trainer.args
    return LearningRule(
        shaping=args.shaping(),
        correction=trainer.correction,
        skips_rows=why_every_row(args) is None and not trainer.aux_loss_enabled,
        stages=trainer.stages,
    )


def train_batch(output: Batch) -> TrainBatch:
    """Return what TRL made of a generation batch."""
    return TrainBatch(
        advantages=output["advantages"],
        mask=_loss_mask(output),
        n_read=output["prompt_mask"].sum(dim=1) + output["completion_mask"].sum(dim=1),
        denominator=output["num_items_in_batch"],
        old_logps=output.get("old_per_token_logps"),
        engine_logps=output.get("sampling_per_token_logps"),
        weights=output.get("importance_sampling_ratio"),
    )


def with_train_batch(output: Batch, before: TrainBatch, after: TrainBatch) -> Batch:
    """Return TRL's batch with what the stages have changed."""
    changed = {**output, "advantages": after.advantages, "num_items_in_batch": after.denominator}
    if after.mask is not before.mask:
        changed["tool_mask"] = after.mask
    if after.old_logps is not None:
        changed["old_per_token_logps"] = after.old_logps
    if after.weights is not None:
        changed["importance_sampling_ratio"] = after.weights
    return changed


def correct_by(trainer: GRPOTrainer, correction: Correction) -> None:
    """Let TRL do its part of a correction, or none."""
    trainer.use_vllm = correction.method in ("trl", "geo_tis")
    if correction.method == "geo_tis":
        trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.vllm_importance_sampling_clip_max = correction.cap
        trainer.vllm_importance_sampling_clip_min = None


def reads_old_policy(trainer: GRPOTrainer, rule: LearningRule) -> bool:
    """Return whether TRL reads this training batch with the old policy, and only rows that have an
    advantage matter there.
    """
    if not (rule.skips_rows and rule.dead_by_rewards_alone):
        return False
    if rule.stages or rule.correction.method == "bypass":  # a stage may give a dead group advantages
        return False
    return updates_are_several(trainer.args) or bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def choose_rows_of_old_policy(trainer: GRPOTrainer, dead: torch.Tensor) -> RowChoice:
    """Return which rows the old policy reads: equally many in every process, as TRL takes several
    rows at a time there, and at least one, so that the engine's numbers stay compared with the
    trainer's.
    """
    n_live = (~dead).sum().to(trainer.accelerator.device)
    n_read = max(1, int(trainer.accelerator.gather(n_live).max()))
    read = torch.zeros_like(dead)
    read[torch.argsort(dead.int(), stable=True)[:n_read]] = True
    return RowChoice(read, math.nan)


def choose_rows(rule: LearningRule, micro_batch: Batch) -> RowChoice | None:
    """Return which rows of a micro-batch the training pass reads; None stands for all of them."""
    if not rule.skips_rows:
        return None
    return RowChoice(_live(micro_batch), micro_batch.get("old_per_token_logps", 0.0))


@contextmanager
def mean_entropy_of_live(trainer: GRPOTrainer, micro_batch: Batch, choice: RowChoice | None) -> Iterator[None]:
    """Let the metric `entropy` be the mean over the rows that were read, in all processes.

    In every process alike, for the counts are gathered. A micro-batch without any such row has no
    entropy: NaN, which TRL leaves out.
    """
    yield
    if choice is None:
        return
    mask = _loss_mask(micro_batch)
    counts = torch.stack([mask.sum(), mask[choice.live].sum()])
    tokens, live_tokens = summed(trainer, counts).tolist()
    logged = trainer._metrics["train"]["entropy"]
    logged[-1] = logged[-1] * tokens / live_tokens if live_tokens else math.nan


def summed(trainer: GRPOTrainer, counts: torch.Tensor) -> torch.Tensor:
    """Return the sum of each of these numbers over all processes."""
    total: torch.Tensor = trainer.accelerator.gather(counts).view(-1, len(counts)).sum(dim=0)
    return total


def weights_in_loss(
    trainer: GRPOTrainer, inputs: Batch, logps: torch.Tensor, live: torch.Tensor | None
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


def advantages_of(batch: TrainBatch) -> list[float]:
    """Return the advantage of each episode; the mean over its trained tokens where they have their own."""
    advantages = batch.advantages
    if advantages.dim() > 1:
        advantages = (advantages * batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)
    return [float(value) for value in advantages.tolist()]


def add_numbers(output: dict[str, Any], numbers: Sequence[int]) -> None:
    """Let each row of TRL's batch bear the number of its episode."""
    output["episode_numbers"] = torch.tensor(numbers, device=output["completion_ids"].device)


def numbers_of(inputs: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the episodes in a piece of a batch, or none if they were not added."""
    numbers = inputs.get("episode_numbers")
    return [] if numbers is None else [int(number) for number in numbers.tolist()]


def segments_of(trainer: GRPOTrainer, trajectories: Sequence[Trajectory]) -> SegmentedRows | None:
    """Return where segments begin in these episodes, or None if no process has one of several."""
    accelerator = trainer.accelerator
    several = torch.tensor(any(one.segment_starts for one in trajectories), device=accelerator.device)
    if not accelerator.gather(several).any():
        return None
    return replace(SegmentedRows.of(trajectories, accelerator.device), most=_most(trainer))


def with_segments(output: Batch, segments: SegmentedRows | None) -> Batch:
    """Return TRL's batch with where segments begin in its rows, if they do in any process."""
    return output if segments is None else {**output, "segment_prompts": segments.n_prompts}


def segments_in(trainer: GRPOTrainer, inputs: Mapping[str, Any]) -> SegmentedRows | None:
    """Return where segments begin in a piece of a batch."""
    n_prompts = inputs.get("segment_prompts")
    return None if n_prompts is None else SegmentedRows(n_prompts, _most(trainer))


def _most(trainer: GRPOTrainer) -> Callable[[int], int]:
    accelerator = trainer.accelerator
    return lambda n: int(accelerator.gather(torch.tensor(n, device=accelerator.device)).max())


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


def live_flags(trainer: GRPOTrainer, rule: LearningRule) -> Any:
    """Return what says of each row of a micro-batch whether it is live, or None where the rows must
    stay where TRL's shuffle put them: all are read, or the loss depends on which stand together.
    """
    if not rule.skips_rows or trainer.loss_type not in TOKEN_LOSSES | ROW_LOSSES:
        return None
    return lambda micro_batch: _live(micro_batch).tolist()


def _live(batch: Mapping[str, Any]) -> torch.Tensor:
    return is_live(batch["advantages"], _loss_mask(batch))


def _loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
