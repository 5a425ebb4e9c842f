"""Answer TRL's calls about a batch, from its rollout to its loss, in this order. Tested with TRL 1.16.0.

    evaluation_loop                      plays and grades the rows of an evaluation
    _generate_and_score_completions      takes a graded batch, lets TRL score it, applies the stages
      _generate, _calculate_rewards      hand over the episodes and the rewards of the batch meanwhile
    _prepare_inputs                      orders the micro-batches
    compute_loss                         of a micro-batch: the rows that are read
    _get_per_token_logps_and_entropies   each forward pass, there and wherever TRL makes one

Between two of these nothing is kept but the batch that is being scored, and what the pass that is being made reads. Two
of `batch.py` watch the passes, `OffPolicy` and `TokenTap`.

Invariants: observers hear of a batch once, when its advantages are known; the calls that are collective are made in every
process alike, in this order; a batch is measured once, by its first pass.

What is private and used (`tests/trainer/test_trl_correction.py`, `test_trl_rewards.py` and `test_trl_seam.py` fail with a
sentence when one of these changes):

* `GRPOTrainer._generate(prompts)` and its 8-tuple, `as_trl`;
* `GRPOTrainer._generate_and_score_completions(inputs)` is the only place that sees the dataset rows of a rollout;
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
* `GRPOTrainer._metrics[mode]["reward"]` is the mean reward of what is trained on;
* `GRPOTrainer._prepare_inputs` keeps the micro-batches of a generation batch in `_buffered_inputs` and counts in
  `_step`; samples are reordered there, within optimizer steps;
* `Trainer.evaluation_loop` is overridden: `evaluate` logs the metrics that it returns, with TRL's `_metrics["eval"]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length
from trl import apply_chat_template

from toolgrpo.engines.policy import Backend, Policy
from toolgrpo.episode.dropped import Drop, reasons_of
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError, TooManyDroppedError
from toolgrpo.evaluation.agreement import EngineProof
from toolgrpo.learning.advantages import members_of
from toolgrpo.learning.correction import (
    Correction,
    EpisodeWeights,
    clipped,
    log_ratios,
    updates_are_several,
    weights_of_rows,
)
from toolgrpo.learning.stages import (
    LOSS,
    WORTH,
    Facts,
    LearningRule,
    Stage,
    TrainBatch,
    applied,
    check_by_token,
    dead_rows,
    rows_may_move,
    why_every_row,
)
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.rollout import Rollouts
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.rollout.row_parts import as_messages
from toolgrpo.shared_pass.group_order import put_in_order
from toolgrpo.support.process_setup import give_memory_back, maps_large_blocks
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.batches import Batches, TakenBatch
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.training_pass import RowChoice, Scores, SegmentedRows
from toolgrpo.trainer.trl import batch as trl_batch
from toolgrpo.trainer.trl import trainer as trl_trainer

_CLIPPED = frozenset(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"))
_SMALL_RUN_RETURNS = 50
"""Rollouts after which a small run returns memory: it spreads slowly, and its pages cost time to get again."""


@dataclass(slots=True)
class _Pass:
    """The passes that TRL is about to make: the rows they read, and what stands for the first of them."""

    inputs: Mapping[str, Any] | None = None  # of the micro-batch whose loss it makes
    choice: RowChoice | None = None
    segments: SegmentedRows | None = None
    old_policy: Sequence[Sequence[float]] | None = None
    logps: torch.Tensor | None = None  # of the last one


class CallsOfTRL(trl_trainer.TrainerOfTRL):
    """A trainer that gives TRL graded batches, and has its loss see them as the stages say."""

    policy: Policy
    progress: RunProgress
    rollouts: Rollouts
    rollout_batches: Batches
    correction: Correction
    stages: Sequence[Stage]
    recorder: EpisodeRecorder
    measure: Callable[..., RolloutBatch]
    _proof: EngineProof
    _n_rollouts = 0  # of training, in this process
    _scoring: TakenBatch | None = None
    _logged_by_rewards: Mapping[str, Sequence[float]] = MappingProxyType({})  # of the last measurement

    def _open_batches(self) -> None:
        """Settle how batches are learnt from, and who watches."""
        self._rule = LearningRule(
            shaping=self.args.shaping(),
            correction=self.correction,
            skips_rows=why_every_row(self.args) is None and not self.aux_loss_enabled,
            leaves_cut_out=self.args.mask_truncated_completions,
            stages=tuple(self.stages),
        )
        self.mask_truncated_completions = False  # a stage does it
        self.off_policy = trl_batch.OffPolicy(self.correction, self.args, log=self._log_metrics, warn=self.progress.say)
        self._token_tap = trl_batch.TokenTap(self.recorder, self.args.record_tokens)
        self._made = _Pass()

    def _correct_by(self, correction: Correction) -> None:
        """Let TRL do its part of a correction, or none."""
        self.correction = correction
        self.use_vllm = correction.method in ("trl", "geo_tis")
        mode = self.args.vllm_importance_sampling_mode
        if correction.method == "trl" and self.loss_type == "vespo" and not mode.startswith("token_"):
            raise ConfigError(
                f"loss_type vespo with rollout_correction trl needs a vllm_importance_sampling_mode by token (token_truncate "
                f"or token_mask), got {mode}"
            )
        if correction.method == "geo_tis":
            self.vllm_importance_sampling_correction = True
            self.vllm_importance_sampling_mode = "token_truncate"
            self.vllm_importance_sampling_clip_max = correction.cap
            self.vllm_importance_sampling_clip_min = None

    # an evaluation

    def evaluation_loop(self, dataloader: Any, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        """Measure all rows in one rollout, and compute no loss."""
        self.model.eval()  # what TRL logs by
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        averages = callable(getattr(inner, "eval", None))  # as schedule-free ones do, until they train again
        if averages:
            self.optimizer.eval()
            self._weights_of_step = None
        rows_of = metric_key_prefix.removeprefix("eval").removeprefix("_")  # one of several data sets
        label = f"evaluation after step {self.state.global_step} on {rows_of}" if rows_of else None
        batch = self.measure(self._evaluation_rows(dataloader), mode="eval", label=label)
        if averages:
            self._weights_of_step = None
        self.rollout_batches.processes.meet()  # rewards may take long too
        shown = [(bool(one.success), {"reward": one.total, **_by_function(one)}) for one in batch.scored]
        of_all: list[tuple[bool, dict[str, float | None]]] = gather_object(shown)
        if not of_all:
            self.progress.say("no episode of this evaluation could be scored, so its success is not known")
        metrics = {"success": sum(success for success, _ in of_all) / len(of_all) if of_all else math.nan}
        metrics["reward"] = math.nan  # unless there are some
        for name in dict.fromkeys(name for _, rewards in of_all for name in rewards):
            values = [value for _, rewards in of_all if (value := rewards.get(name)) is not None]
            metrics[name] = sum(values) / len(values) if values else math.nan
        logged = gather_object([dict(self._logged_by_rewards)])
        for name in dict.fromkeys(name for part in logged for name in part):
            numbers = [number for part in logged for number in part.get(name, ())]
            metrics.setdefault(name, sum(numbers) / len(numbers))
        self._metrics["eval"].update({name: [value] for name, value in metrics.items()})
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, named, len(of_all))

    def _evaluation_rows(self, dataloader: Any) -> list[Row]:
        """Return this process's share of the rows of an evaluation, each as often as it has episodes."""
        rows = dataloader.dataset
        size, own, n = (
            trl_trainer.group_size(self, "eval"),
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        # not through the data loader, which repeats rows where they do not divide evenly among processes
        if has_length(rows):
            return [rows[number] for number in range(own, len(rows), n) for _ in range(size)]
        whole = getattr(rows, "dataset", rows)  # of accelerate's share; TRL has repeated its rows
        return [row for place, row in enumerate(whole) if place // size % n == own]

    # a batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        """Return what TRL makes of a generation batch, as its loss shall see it."""
        taken = self.rollout_batches.take(inputs)
        self._return_memory()
        self._proof.hear(taken.ran)
        self._count_tokens(sum(len(one.prompt_ids) + len(one.ids) for one in taken.ran.trajectories))
        facts = self._facts(taken)
        segments = self._segments_of(taken.trajectories)
        choice = self._rows_of_old_policy(facts)
        if choice is not None:
            facts = replace(facts, unread=~choice.live)
        stands_in = self.off_policy.is_bypass and updates_are_several(self.args)
        logps = trl_batch.engine_logps(taken.trajectories) if stands_in else None
        self._scoring = taken
        with self._passes(_Pass(None, choice, segments, logps)):
            # copies: TRL writes the extra fields of an episode into the rows that it scores
            output = super()._generate_and_score_completions([dict(one.row) for one in taken.scored])
        self._scoring = None
        self._log_drawn(taken)
        scored = trl_batch.train_batch(output)
        if choice is not None and scored.weights is not None:
            self._log_ratios(scored.weights[choice.live], scored.mask[choice.live])
        worth = applied((*WORTH, *self._rule.stages), scored, facts)
        if worth.advantages.dim() > 1:
            check_by_token(self.args)
        numbers = self._tell(taken, worth)
        learnt = applied(LOSS, worth, facts)
        self._log_metrics(learnt.metrics)
        self.off_policy.told(learnt.weighted)
        output = trl_batch.with_train_batch(output, scored, learnt, segments)
        self._token_tap.mark(output, numbers)
        return output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        trl_jobs.refuse_rollout_func(self.rollout_func)  # set on a trainer that was made already
        assert self._scoring is not None and len(prompts) == len(self._scoring.scored)
        return trl_batch.as_trl(self._scoring.trajectories, trl_trainer.pad_id(self))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Return the rewards of the batches of all processes; what the rewards have logged goes to TRL with it."""
        taken = self._scoring
        assert taken is not None
        for name, values in taken.answers.columns.items():
            self._pending_extra_logs[name].extend(values)
        for name, numbers in taken.answers.metrics.items():
            self._pending_metrics[name].extend(numbers)
        own = [
            # TRL leaves a row of NaN alone out of mean and deviation, so its group is judged without it
            (math.nan,) * len(values) if one.drop is not None else values
            for one, values in zip(taken.scored, taken.answers.values, strict=True)
        ]
        return self.accelerator.gather(torch.tensor(own, dtype=torch.float32, device=self.accelerator.device))

    def _ask_model(self, number: int, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Return what a reward model says of these conversations."""
        model, tokenizer = self.reward_funcs[number], self.reward_processing_classes[number]
        whole = [{"messages": [*as_messages(p), *c]} for p, c in zip(prompts, completions, strict=True)]
        texts = [apply_chat_template(one, tokenizer, **self.chat_template_kwargs)["text"] for one in whole]
        # An evaluation has many more episodes than a batch. Processes that share a model out must ask it equally often.
        in_training = self.args.per_device_train_batch_size * self.args.steps_per_generation
        n, shared = len(texts), self.policy.backend.splits_parameters
        texts = texts or ([tokenizer.pad_token] if shared else [])  # a pass that scores nobody
        at_a_time = len(texts) if shared else in_training
        scores: list[float] = []
        for first in range(0, len(texts), at_a_time):
            some = texts[first : first + at_a_time]
            encoded = tokenizer(
                text=some, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
            )
            with torch.inference_mode():
                scores += model(**Trainer._prepare_inputs(self, encoded)).logits[:, 0].float().tolist()
        return scores[:n]

    def _log_drawn(self, taken: TakenBatch) -> None:
        """Let `reward` be the mean of everything that was drawn; TRL's, of what is trained on, stands beside it."""
        if taken.metrics_of_all is None:
            return
        collected = self._metrics["train"]
        collected["reward_trained"].append(collected["reward"].pop())
        collected["reward"].append(taken.reward)
        for name, value in taken.metrics_of_all.items():
            collected[name].append(value)

    def _facts(self, taken: TakenBatch) -> Facts:
        n = len(taken.scored)
        first = self.rollout_batches.processes.index * n
        return Facts(
            episodes=taken.scored,
            rule=self._rule,
            group_size=self.args.num_generations,
            max_completion_length=self.args.max_completion_length,
            members=gather_object(members_of(taken.scored)),
            gathered=lambda values: gather_object(list(values)),
            own=slice(first, first + n),
            summed=self._summed,
        )

    def _rows_of_old_policy(self, facts: Facts) -> RowChoice | None:
        """Return which rows TRL reads with the old policy, where only those that have an advantage matter; None: it
        reads all of them, or none.

        Equally many in every process, as TRL takes several rows at a time there, and at least one, so that the engine's
        numbers stay compared with the trainer's.
        """
        rule = self._rule
        if not (rule.skips_rows and rule.dead_by_rewards_alone):
            return None
        if rule.stages or rule.correction.method == "bypass":  # a stage may give a dead group advantages
            return None
        if not (updates_are_several(self.args) or (self.use_vllm and self.vllm_importance_sampling_correction)):
            return None
        dead = torch.tensor(dead_rows(facts), device=self.args.device)
        n_live = (~dead).sum().to(self.accelerator.device)
        n_read = max(1, int(self.accelerator.gather(n_live).max()))
        read = torch.zeros_like(dead)
        # stable, so that a repeated run fills up with the same dead rows
        read[torch.argsort(dead.int(), stable=True)[:n_read]] = True
        return RowChoice(read, math.nan)

    def _log_ratios(self, weights: torch.Tensor, mask: torch.Tensor) -> None:
        """Log the engine's ratios of the rows that were read; TRL counts each of the others as 1."""
        own = weights.flatten() if weights.shape[1] == 1 else weights[mask.bool()]
        part = [(float(own.min()), float(own.sum()), float(own.max()), len(own))] if len(own) else []
        lows, sums, highs, counts = zip(*(gather_object(part) or [(0.0, 0.0, 0.0, 1)]), strict=True)
        for name, value in {"min": min(lows), "mean": sum(sums) / sum(counts), "max": max(highs)}.items():
            self._metrics["train"][f"sampling/importance_sampling_ratio/{name}"][-1] = value

    def _segments_of(self, trajectories: Sequence[Trajectory]) -> SegmentedRows | None:
        """Return where segments begin in these episodes, or None if no process has one of several."""
        device = self.accelerator.device
        several = torch.tensor(any(one.segment_starts for one in trajectories), device=device)
        if not self.accelerator.gather(several).any():
            return None
        return replace(SegmentedRows.of(trajectories, device), most=self._most)

    def _most(self, n: int) -> int:
        return int(self.accelerator.gather(torch.tensor(n, device=self.accelerator.device)).max())

    def _tell(self, taken: TakenBatch, worth: TrainBatch) -> list[int]:
        """Let observers hear of the batch, now that its advantages are known; return the numbers of what TRL scores."""
        numbers = [int(trajectory.metadata["episode"]) for trajectory in taken.trajectories]
        none = (None,) * len(numbers)
        columns = (trl_batch.advantages_of(worth), worth.turn_advantages or none, worth.turn_rewards or none)
        own = dict(zip(numbers, zip(*columns, strict=True), strict=True))
        # A group that was drawn may be trained on in another process than the one it ran in.
        parts = [own] if taken.metrics_of_all is None else gather_object([own])
        advantages = {number: advantage for part in parts for number, advantage in part.items()}
        given = [advantages.get(int(t.metadata["episode"]), (None,) * 3) for t in taken.ran.trajectories]
        batch = taken.ran.with_advantages(*zip(*given, strict=True)) if given else taken.ran
        self.rollouts.observers.batch_done(batch)
        self._token_tap.choose(batch)
        check_dropped_share(gather_object([one.drop for one in batch.episodes]), self.args.max_dropped_share)
        return numbers

    def _return_memory(self) -> None:
        """Give back, on a CPU, what rollouts have left between the tensors of the passes to come."""
        if self.args.device.type == "cpu":
            if maps_large_blocks() or self._n_rollouts % _SMALL_RUN_RETURNS == 0:
                give_memory_back()
            self._n_rollouts += 1

    # a micro-batch

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Put groups together where prompts may be shared, and first what is trained where the rest is skipped.

        Rows stay where TRL's shuffle put them where all are read, or where the loss depends on which stand together.
        """
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        buffered, args = self._buffered_inputs, self.args
        # TRL fills its buffer once for a generation batch; between two fills it is in order already
        if buffered is before:
            return inputs
        live_first, by_prompt = self._rule.skips_rows, args.prefix_sharing != "off"
        if (by_prompt or live_first) and rows_may_move(args):
            is_live = (lambda micro_batch: trl_batch.live(micro_batch).tolist()) if live_first else None
            self._buffered_inputs = put_in_order(
                buffered, args.gradient_accumulation_steps, is_live, by_prompt=by_prompt
            )
        return self._buffered_inputs[self._step % len(buffered)]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch, of the rows that have something to learn from."""
        old_logps, starts = inputs.get("old_per_token_logps"), inputs.get("segment_prompts")
        choice = None
        if self._rule.skips_rows:
            choice = RowChoice(trl_batch.live(inputs), 0.0 if old_logps is None else old_logps)
        segments = None if starts is None else SegmentedRows(starts, self._most)
        with self._passes(_Pass(inputs, choice, segments)) as made:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if choice is not None:
                self._mean_entropy_of(choice, inputs)
            self.off_policy.heard(lambda: self._weights_in_loss(inputs, made))
        return loss

    def _mean_entropy_of(self, choice: RowChoice, micro_batch: dict[str, Any]) -> None:
        """Let the metric `entropy` be the mean over the rows that were read, in all processes.

        In every process alike, for the counts are gathered. A micro-batch without any such row has no
        entropy: NaN, which TRL leaves out.
        """
        mask = trl_batch.loss_mask(micro_batch)
        tokens, live_tokens = self._summed(torch.stack([mask.sum(), mask[choice.live].sum()])).tolist()
        logged = self._metrics["train"]["entropy"]
        logged[-1] = logged[-1] * tokens / live_tokens if live_tokens else math.nan

    def _weights_in_loss(self, inputs: dict[str, Any], made: _Pass) -> list[EpisodeWeights]:
        """Return how the loss weights the episodes of a micro-batch whose old policy is the engine."""
        if made.logps is None or "old_per_token_logps" not in inputs:
            return []
        mask = trl_batch.loss_mask(inputs)
        log_ratio = log_ratios(made.logps.detach(), inputs["old_per_token_logps"], mask)
        weights, used = log_ratio.exp(), log_ratio
        if self.importance_sampling_level == "sequence":
            mean = (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
            weights, used = mean.exp().expand_as(log_ratio), mean.expand_as(log_ratio)
        if self.loss_type in _CLIPPED:
            weights = clipped(used, inputs["advantages"], self.epsilon_low, self.epsilon_high)
        if made.choice is not None:
            live = made.choice.live
            log_ratio, weights, mask = log_ratio[live], weights[live], mask[live]
        return weights_of_rows(log_ratio, weights, mask)

    # a forward pass

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Scores:
        """Return what a forward pass gives for the tokens of its rows, of which it may read some."""
        made = self._made
        # taken once: it stands for TRL's first pass, of the old policy; the later ones are the reference's and the
        # loss's
        known, made.old_policy = made.old_policy, None
        if known is not None:
            logps = torch.zeros(len(known), logits_to_keep, device=input_ids.device)
            for place, row in enumerate(known):
                logps[place, : len(row)] = torch.tensor(row)
            return logps, None, None
        score: Callable[..., Scores] = partial(self._shared_logps, super()._get_per_token_logps_and_entropies, model)
        choice, segments = made.choice, made.segments
        if segments is not None:
            chosen = segments if choice is None else segments.chosen(choice.live)
            score = partial(chosen.score, score)
        whole = (input_ids, attention_mask, logits_to_keep, *args)
        scored: Scores = score(*whole, **kwargs) if choice is None else choice.score(score, *whole, **kwargs)
        made.logps = scored[0]
        if made.inputs is not None:
            self._token_tap.hear(made.inputs, scored, None if choice is None else choice.live)
        return scored

    @contextmanager
    def _passes(self, made: _Pass) -> Iterator[_Pass]:
        self._made = made
        try:
            yield made
        finally:
            self._made = _Pass()


def check_models(reward_funcs: Iterable[Any], args: ToolGRPOConfig, backend: Backend) -> None:
    """Raise if a reward model would have to be asked by one process alone, and cannot be."""
    has_model = any(isinstance(one, torch.nn.Module) for one in reward_funcs)
    if args.draws_groups and has_model and backend.splits_parameters:
        raise ConfigError(
            "dynamic_sampling asks rewards when a group ends, in each process for itself, but the "
            "reward model is split over the processes; use a reward function, or a backend that splits nothing"
        )


def _by_function(episode: Scored) -> dict[str, float | None]:
    return {f"rewards/{name}/mean": value for name, value in episode.rewards.items()}


def check_dropped_share(drops: Sequence[Drop | None], most: float) -> None:
    """Raise if more than this share of the episodes of all processes was dropped.

    An episode that no reward could score is no failure of the model: it is left out of its group. Many
    of them are failures of the infrastructure or of a plugin, and end the run with their causes.
    """
    dropped = [drop for drop in drops if drop is not None]
    if len(dropped) <= most * len(drops):
        return
    raise TooManyDroppedError(
        f"{len(dropped)} of {len(drops)} episodes of this batch could not be scored, more than max_dropped_share "
        f"({most:g}) allows: {reasons_of(dropped)}. Nothing was trained on this batch. Fix the cause and resume with "
        f"--resume_from_checkpoint auto, or allow more with --max_dropped_share."
    )
