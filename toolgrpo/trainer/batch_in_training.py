"""The batch that a trainer works on, as TRL comes by for it.

    evaluated                plays and grades the rows of an evaluation
    generate_and_score       takes a graded batch, lets TRL score it, applies the stages; around these two
      generate               its episodes as TRL's tuple
      rewards                its rewards as TRL's tensor
    compute_loss             of a micro-batch: the rows that are read
      score_tokens           each forward pass, there and wherever TRL makes one

TRL's calls only translate. Between two of them nothing is kept but the batch that is being scored, and
what the pass that is being made reads.

Invariants: observers hear of a batch once, when its advantages are known; the calls that are collective
are made in every process alike, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.learning.dropped import check_dropped_share
from toolgrpo.learning.shaping import members_of
from toolgrpo.learning.stages import LOSS, WORTH, Facts, TrainBatch, applied, dead_rows
from toolgrpo.learning.turns import episode_turns
from toolgrpo.rollout.batch import Row
from toolgrpo.rollout.observers import Observers
from toolgrpo.startup import give_memory_back, maps_large_blocks
from toolgrpo.trainer.batches import Batches, TakenBatch
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.engine_proof import EngineProof
from toolgrpo.trainer.off_policy import OffPolicy
from toolgrpo.trainer.pass_rows import RowChoice, Scores, SegmentedRows
from toolgrpo.trainer.token_tap import TokenTap
from toolgrpo.trainer.trl import batch as trl_batch
from toolgrpo.trainer.trl import rewards as trl_rewards
from toolgrpo.trainer.trl import trainer as trl_trainer

_SMALL_RUN_RETURNS = 50
"""Rollouts after which a small run returns memory: it spreads slowly, and its pages cost time to get again."""


@dataclass(slots=True)
class _Pass:
    """The passes that TRL is about to make: the rows they read, and what stands for the first of them."""

    choice: RowChoice | None = None
    segments: SegmentedRows | None = None
    old_policy: Sequence[Sequence[float]] | None = None
    logps: torch.Tensor | None = None  # of the last one


class BatchInTraining:
    """One trainer's, which is only handed on to `trl/`."""

    def __init__(
        self,
        trainer: Any,
        args: ToolGRPOConfig,
        batches: Batches,
        observers: Observers,
        off_policy: OffPolicy,
        proof: EngineProof,
        token_tap: TokenTap,
    ) -> None:
        self._trainer = trainer
        self._args = args
        self._observers = observers
        self._batches = batches
        self._off_policy = off_policy
        self._proof = proof
        self._token_tap = token_tap
        self._n_rollouts = 0  # of training, in this process
        self._taken: TakenBatch | None = None  # while TRL scores it
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
        if trl_batch.reads_old_policy(trainer):
            dead = torch.tensor(dead_rows(facts), device=self._args.device)
            choice = trl_batch.choose_rows_of_old_policy(trainer, dead)
            facts = replace(facts, unread=~choice.live)
        stands_in = self._off_policy.is_bypass and trl_batch.steps_differ(trainer)
        logps = trl_batch.engine_logps(taken.trajectories) if stands_in else None
        self._taken = taken
        with self._passes(_Pass(choice, segments, logps)):
            # copies: TRL writes the extra fields of an episode into the rows that it scores
            output = of_trl([dict(one.row) for one in taken.scored])
        self._taken = None
        trl_rewards.log_drawn(trainer, taken)
        scored = trl_batch.train_batch(output)
        worth = applied(WORTH, scored, facts)
        numbers = self._tell(taken, worth)
        learnt = applied(LOSS, worth, facts)
        trl_trainer.log_metrics(trainer, learnt.metrics)
        self._off_policy.told(learnt.weighted)
        output = trl_batch.with_segments(trl_batch.with_train_batch(output, scored, learnt), segments)
        self._token_tap.mark(output, numbers)
        return output

    def evaluated(self, rows: Sequence[Row]) -> tuple[dict[str, float], int]:
        """Return the metrics of an evaluation of these rows, over all processes, and how many episodes were scored."""
        taken = self._batches.take(rows, "eval")
        self._observers.batch_done(taken.ran)
        return trl_rewards.log_evaluation(self._trainer, taken.ran.scored)

    def generate(self, prompts: Sequence[Any]) -> tuple[Any, ...]:
        """Return the episodes of the batch that is being scored, in the form of TRL."""
        assert self._taken is not None and len(prompts) == len(self._taken.scored)
        pad_id = trl_trainer.pad_id(self._trainer)
        return trl_batch.as_trl(self._taken.trajectories, pad_id, self._args.void_turns)

    def rewards(self) -> torch.Tensor:
        """Return the rewards of the batches that are being scored in all processes."""
        assert self._taken is not None
        return trl_rewards.rewards_of_all(self._trainer, self._taken)

    def compute_loss(self, inputs: dict[str, Any], of_trl: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss of a micro-batch, of the rows that have something to learn from."""
        trainer = self._trainer
        choice = trl_batch.choose_rows(trainer, inputs)
        with self._passes(_Pass(choice, trl_batch.segments_in(trainer, inputs))) as made:
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
        self._token_tap.hear(scored)
        return scored

    @contextmanager
    def _passes(self, made: _Pass) -> Iterator[_Pass]:
        self._pass = made
        try:
            yield made
        finally:
            self._pass = _Pass()

    def _facts(self, taken: TakenBatch) -> Facts:
        trainer = self._trainer
        rule, n = trl_batch.learning_rule(trainer), len(taken.scored)
        first = self._batches.processes.index * n
        by_turn = rule.credit.by_turn
        return Facts(
            rule=rule,
            group_size=self._args.num_generations,
            members=gather_object(members_of(taken.scored)),
            own=slice(first, first + n),
            turns=gather_object(episode_turns(taken.scored)) if by_turn else (),
            spans=[[(turn.start, turn.end) for turn in one.turns] for one in taken.trajectories] if by_turn else (),
            summed=partial(trl_batch.summed, trainer),
        )

    def _tell(self, taken: TakenBatch, worth: TrainBatch) -> list[int]:
        """Let observers hear of the batch, now that its advantages are known; return the numbers of what TRL scores."""
        numbers = [int(trajectory.metadata["episode"]) for trajectory in taken.trajectories]
        of_turns = worth.of_turns or (None,) * len(numbers)
        own = dict(zip(numbers, zip(trl_batch.advantages_of(worth), of_turns, strict=True), strict=True))
        # A group that was drawn may be trained on in another process than the one it ran in.
        parts = [own] if taken.metrics_of_all is None else gather_object([own])
        advantages = {number: advantage for part in parts for number, advantage in part.items()}
        given = [advantages.get(int(t.metadata["episode"]), (None, None)) for t in taken.ran.trajectories]
        batch = taken.ran.with_advantages([advantage for advantage, _ in given], [of for _, of in given])
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
