"""The batch that a trainer works on, as TRL comes by for it.

    evaluated                plays and grades the rows of an evaluation
    generate_and_score       takes a graded batch, lets TRL score it, applies the stages
      scoring                the batch meanwhile, whose episodes and rewards TRL asks for
    compute_loss             of a micro-batch: the rows that are read
      score_tokens           each forward pass, there and wherever TRL makes one

TRL's calls only translate. Between two of them nothing is kept but the batch that is being scored, and
what the pass that is being made reads. Two watch the passes: `OffPolicy` says how far engine and trainer
are apart, and `TokenTap` tells the recorder what a few episodes' tokens gave.

Invariants: observers hear of a batch once, when its advantages are known; the calls that are collective
are made in every process alike, in this order; a batch is measured once, by its first pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.episode.dropped import Drop
from toolgrpo.errors import TooManyDroppedError
from toolgrpo.evaluation.agreement import EngineProof
from toolgrpo.learning.correction import (
    Correction,
    EpisodeWeights,
    cut_by,
    difference_metrics,
    updates_are_several,
    weight_metrics,
)
from toolgrpo.learning.shaping import members_of
from toolgrpo.learning.stages import LOSS, WORTH, Facts, TrainBatch, applied, check_by_token, dead_rows
from toolgrpo.observe.recorder import EpisodeRecorder
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.rollout.observers import Observers
from toolgrpo.support.process_setup import give_memory_back, maps_large_blocks
from toolgrpo.trainer.batches import Batches, TakenBatch
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.pass_rows import RowChoice, Scores, SegmentedRows
from toolgrpo.trainer.trl import batch as trl_batch
from toolgrpo.trainer.trl import trainer as trl_trainer

_REASONS_SHOWN, _LONGEST_REASON = 3, 200  # of dropped episodes, where they are too many
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


class TokenTap:
    """Tell the recorder what the training pass saw of a few episodes' tokens.

    Of each rollout `n` episodes are chosen, in turn the one with the most positive and the one with the
    most negative advantage. Their numbers travel with TRL's batch through its shuffling and splitting
    (`trl_batch.add_numbers`), and are met again in the pass that makes the loss. Nothing is drawn at
    random, and nothing that is trained on changes.
    """

    def __init__(self, recorder: EpisodeRecorder, n: int) -> None:
        self._recorder = recorder
        self._n = n if recorder.path is not None else 0
        self._chosen: dict[int, Scored] = {}
        self._step = 0

    def mark(self, output: dict[str, Any], numbers: Sequence[int]) -> None:
        """Mark TRL's rows with the numbers of their episodes."""
        if self._n:
            trl_batch.add_numbers(output, numbers)

    def choose(self, batch: RolloutBatch) -> None:
        """Choose among the episodes of a rollout."""
        if self._n == 0:
            return
        self._step = batch.step
        recorded = [
            one
            for place, one in enumerate(batch.episodes)
            if one.trajectory.ids and self._recorder.records(batch, place)
        ]
        chosen = chosen_episodes(recorded, self._n)
        self._chosen = {one.trajectory.metadata["episode"]: one for one in chosen}

    def hear(self, inputs: Mapping[str, Any], scored: Scores) -> None:
        """Record, once, what the pass over a micro-batch gave for the chosen episodes."""
        if not self._chosen:
            return
        logps, entropies, _ = scored
        for row, number in enumerate(trl_batch.numbers_of(inputs)):
            episode = self._chosen.pop(number, None)
            if episode is not None:
                seen = trl_batch.tokens_of_row(inputs, row, logps, entropies, episode.trajectory.mask)
                line = {"step": self._step, "episode": number, **seen}
                self._recorder.tokens_seen(line, list(episode.trajectory.ids))


def chosen_episodes(episodes: Sequence[Scored], n: int) -> list[Scored]:
    """Return up to `n` episodes, in turn the most positive and the most negative advantage."""
    ordered = sorted((one for one in episodes if one.advantage), key=lambda one: one.advantage or 0.0)
    last = len(ordered) - 1
    return [ordered[last - place // 2 if place % 2 == 0 else place // 2] for place in range(min(n, len(ordered)))]


class BatchInTraining:
    """One trainer's, which is only handed on to `trl/`."""

    def __init__(
        self,
        trainer: Any,
        args: ToolGRPOConfig,
        batches: Batches,
        observers: Observers,
        proof: EngineProof,
        correction: Correction,
        recorder: EpisodeRecorder,
        say: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._args = args
        self.rule = trl_batch.learning_rule(trainer)
        self._observers = observers
        self._batches = batches
        self._proof = proof
        self._off_policy = OffPolicy(correction, args, log=partial(trl_trainer.log_metrics, trainer), warn=say)
        self._token_tap = TokenTap(recorder, args.record_tokens)
        self._n_rollouts = 0  # of training, in this process
        self._scoring: TakenBatch | None = None
        self._pass = _Pass()

    def generate_and_score(self, inputs: list[dict[str, Any]], of_trl: Callable[[Any], dict[str, Any]]) -> Any:
        """Return what TRL makes of a generation batch, as its loss shall see it."""
        trainer = self._trainer
        taken = self._batches.take(inputs, "train")
        self._return_memory()
        self._proof.hear(taken.ran)
        trl_trainer.count_tokens(trainer, sum(len(one.prompt_ids) + len(one.ids) for one in taken.ran.trajectories))
        facts = self._facts(taken)
        segments = trl_batch.segments_of(trainer, taken.trajectories)
        choice = None
        if trl_batch.reads_old_policy(trainer, self.rule):
            dead = torch.tensor(dead_rows(facts), device=self._args.device)
            choice = trl_batch.choose_rows_of_old_policy(trainer, dead)
            facts = replace(facts, unread=~choice.live)
        stands_in = self._off_policy.is_bypass and updates_are_several(self._args)
        logps = trl_batch.engine_logps(taken.trajectories) if stands_in else None
        self._scoring = taken
        with self._passes(_Pass(None, choice, segments, logps)):
            # copies: TRL writes the extra fields of an episode into the rows that it scores
            output = of_trl([dict(one.row) for one in taken.scored])
        self._scoring = None
        trl_batch.log_drawn(trainer, taken)
        scored = trl_batch.train_batch(output)
        worth = applied((*WORTH, *self.rule.stages), scored, facts)
        if worth.advantages.dim() > 1:
            check_by_token(self._args)
        numbers = self._tell(taken, worth)
        learnt = applied(LOSS, worth, facts)
        trl_trainer.log_metrics(trainer, learnt.metrics)
        self._off_policy.told(learnt.weighted)
        output = trl_batch.with_segments(trl_batch.with_train_batch(output, scored, learnt), segments)
        self._token_tap.mark(output, numbers)
        return output

    def evaluated(self, rows: Sequence[Row]) -> Sequence[Scored]:
        """Return this process's episodes of an evaluation of these rows."""
        taken = self._batches.take(rows, "eval")
        self._observers.batch_done(taken.ran)
        return taken.ran.scored

    @property
    def scoring(self) -> TakenBatch:
        """Return the batch that TRL is scoring."""
        assert self._scoring is not None
        return self._scoring

    def compute_loss(self, inputs: dict[str, Any], of_trl: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss of a micro-batch, of the rows that have something to learn from."""
        trainer = self._trainer
        choice = trl_batch.choose_rows(self.rule, inputs)
        with self._passes(_Pass(inputs, choice, trl_batch.segments_in(trainer, inputs))) as made:
            with trl_batch.mean_entropy_of_live(trainer, inputs, choice):
                loss = of_trl()
            self._off_policy.heard(trainer, inputs, made.logps, None if choice is None else choice.live)
        return loss

    def score_tokens(
        self,
        score: Callable[..., Scores],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Scores:
        """Return what a forward pass gives for the tokens of its rows, of which it may read some."""
        made = self._pass
        known, made.old_policy = made.old_policy, None
        if known is not None:
            logps = torch.zeros(len(known), logits_to_keep, device=input_ids.device)
            for place, row in enumerate(known):
                logps[place, : len(row)] = torch.tensor(row)
            return logps, None, None
        choice, segments = made.choice, made.segments
        if segments is not None:
            score = partial((segments if choice is None else segments.chosen(choice.live)).score, score)
        whole = (input_ids, attention_mask, logits_to_keep, *args)
        scored = score(*whole, **kwargs) if choice is None else choice.score(score, *whole, **kwargs)
        made.logps = scored[0]
        if made.inputs is not None:
            self._token_tap.hear(made.inputs, scored)
        return scored

    @contextmanager
    def _passes(self, made: _Pass) -> Iterator[_Pass]:
        self._pass = made
        try:
            yield made
        finally:
            self._pass = _Pass()

    def _facts(self, taken: TakenBatch) -> Facts:
        n = len(taken.scored)
        first = self._batches.processes.index * n
        return Facts(
            episodes=taken.scored,
            rule=self.rule,
            group_size=self._args.num_generations,
            max_completion_length=self._args.max_completion_length,
            members=gather_object(members_of(taken.scored)),
            gathered=lambda values: gather_object(list(values)),
            own=slice(first, first + n),
            summed=partial(trl_batch.summed, self._trainer),
        )

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
        self._observers.batch_done(batch)
        self._token_tap.choose(batch)
        check_dropped_share(gather_object([one.drop for one in batch.episodes]), self._args.max_dropped_share)
        return numbers

    def _return_memory(self) -> None:
        """Give back, on a CPU, what rollouts have left between the tensors of the passes to come."""
        if self._args.device.type == "cpu":
            if maps_large_blocks() or self._n_rollouts % _SMALL_RUN_RETURNS == 0:
                give_memory_back()
            self._n_rollouts += 1


def check_dropped_share(drops: Sequence[Drop | None], most: float) -> None:
    """Raise if more than this share of the episodes of all processes was dropped.

    An episode that no reward could score is no failure of the model: it is left out of its group. Many
    of them are failures of the infrastructure or of a plugin, and end the run with their causes.
    """
    dropped = [drop for drop in drops if drop is not None]
    if len(dropped) <= most * len(drops):
        return
    reasons = Counter(f"{drop.cause}: {_short(drop.reason)}" for drop in dropped).most_common()
    told = "; ".join(f"{count} x {reason}" for reason, count in reasons[:_REASONS_SHOWN])
    more = f"; and {len(reasons) - _REASONS_SHOWN} other reasons" if len(reasons) > _REASONS_SHOWN else ""
    raise TooManyDroppedError(
        f"{len(dropped)} of {len(drops)} episodes of this batch could not be scored, more than max_dropped_share "
        f"({most:g}) allows: {told}{more}. Nothing was trained on this batch. Mend the cause and go on with "
        f"--resume_from_checkpoint auto, or allow more with --max_dropped_share."
    )


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."
