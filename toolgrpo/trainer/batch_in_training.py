"""The life of one batch between the calls of TRL: rows, episodes, rewards, advantages, loss.

TRL comes by in this order:

    generate_and_score       the rows of a generation batch; around the next two
      generate               its episodes, run here or drawn before
      calculate_rewards      what they are worth, asked once
    compute_loss             of a micro-batch: the rows that are read
      score_tokens           each forward pass, there and wherever TRL makes one

What one call leaves for a later one of the same batch is kept here and nowhere else.

Invariants: rewards are asked once per episode; observers hear of a batch once, when its advantages
are known; the calls that are collective are made in every process alike, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.credit.turn_rewards import TurnRewards
from toolgrpo.rollout import RolloutBatch, Rollouts
from toolgrpo.rollout.batch import Mode, Row
from toolgrpo.startup import give_memory_back, maps_large_blocks
from toolgrpo.trainer import reward_seam, trl_batch, trl_jobs, trl_seam
from toolgrpo.trainer.batch_signal import BatchCredit, BatchSignal
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trainer.drawn_batches import DrawnBatch, DrawnBatches
from toolgrpo.trainer.engine_proof import EngineProof
from toolgrpo.trainer.generation_output import GenerationOutput
from toolgrpo.trainer.groups_ahead import GroupsAhead
from toolgrpo.trainer.live_rows import RowChoice, Scores
from toolgrpo.trainer.off_policy import OffPolicy
from toolgrpo.trainer.overlap import BatchesAhead
from toolgrpo.trainer.segmented_rows import SegmentedRows
from toolgrpo.trainer.token_tap import TokenTap

Rows = Sequence[Mapping[str, Any]]


_SMALL_RUN_RETURNS = 50
"""Rollouts after which a small run returns memory: it spreads slowly, and its pages cost time to get again."""


class BatchInTraining:
    """The batch that a trainer works on; the trainer itself is only handed on to TRL's seams.

    `run` runs an episode per row with the current weights; `load_weights` gives them to the engine
    and returns the step they are of; `calculate_rewards` asks the trainer as TRL would.
    """

    def __init__(
        self,
        trainer: Any,
        args: ToolGRPOConfig,
        rollouts: Rollouts,
        *,
        run: Callable[[Rows, Mode], RolloutBatch],
        load_weights: Callable[[], int],
        calculate_rewards: Callable[..., torch.Tensor],
        group_size: Callable[[Mode], int],
        drawing: DrawnBatches | None,
        ahead: BatchesAhead | GroupsAhead | None,
        off_policy: OffPolicy,
        proof: EngineProof,
        token_tap: TokenTap,
        turn_rewards: TurnRewards,
        pad_id: int,
        process: int,
        n_processes: int,
    ) -> None:
        self.rollout_seconds = 0.0
        self.n_episodes = 0  # of all processes, so far
        self._n_rollouts = 0  # of training, in this process
        self._trainer = trainer
        self._args = args
        self._rollouts = rollouts
        self._run = run
        self._load_weights = load_weights
        self._calculate_rewards = calculate_rewards
        self._group_size = group_size
        self._drawing = drawing
        self._ahead = ahead
        self._off_policy = off_policy
        self._proof = proof
        self._token_tap = token_tap
        self._pad_id = pad_id
        self._process, self._n_processes = process, n_processes
        self._signal = BatchSignal(trainer, args, group_size)
        self._credit = BatchCredit(trainer, args.credits(), turn_rewards, args.num_generations)
        self._rows: Rows = []
        self._drawn: DrawnBatch | None = None  # the batch that TRL scores, where its groups were drawn here
        self._ran: RolloutBatch | None = None  # from its generation until its advantages are known
        self._asked_rewards: torch.Tensor | None = None  # from their asking until TRL wants them
        self._in_dead_groups: Any = None  # of the batch that was graded last, a flag per row
        self._row_choice: RowChoice | None = None  # of the pass that TRL is about to make
        self._segments: SegmentedRows | None = None  # in the rows of that pass, where an episode has several
        self._logps: torch.Tensor | None = None  # of the last pass

    def generate_and_score(self, inputs: list[dict[str, Any]], of_trl: Callable[[Any], dict[str, Any]]) -> Any:
        """Return what TRL makes of a generation batch, as its loss shall see it."""
        drawing = self._drawing if self._mode == "train" else None
        self._drawn = drawn = None if drawing is None else self._draw(drawing, len(inputs))
        rows: Sequence[Row] = inputs
        if drawn is not None:
            rows = drawn.rows
        elif self._ahead is not None and self._mode == "train":
            self._ran = self._ahead.take(len(inputs))
            rows = [one.row for one in self._ran.episodes]
        # copies: TRL writes the extra fields of an episode into the rows that it scores
        self._rows = inputs = [dict(row) for row in rows]
        output = of_trl(inputs)
        if drawn is not None:
            reward_seam.log_drawn(self._trainer, drawn)
        old_choice, self._row_choice = self._row_choice, None
        segments, self._segments = self._segments, None
        output = trl_batch.with_segments(output, segments)
        output = trl_batch.clear_dead_groups(self._signal.applied(output), self._in_dead_groups)
        if self._mode == "train":
            output = self._credit.applied(output, self._signal.outcomes)
        output = self._off_policy.applied(output, self._mode)
        self._tell_of_batch(output)
        output = self._off_policy.without_masked(trl_batch.fill_old_logps(output, old_choice))
        output, shares = trl_batch.settle_denominator(self._trainer, output)
        if self._mode == "train":
            trl_seam.log_metrics(self._trainer, shares)
        return output

    def _draw(self, drawing: DrawnBatches, n_rows: int) -> DrawnBatch:
        step = self._load_weights() if drawing.ahead is None else drawing.ahead.step
        drawn = drawing.draw(
            self._rollouts,
            self._args.sampling_options(),
            partial(reward_seam.ask_rewards, self._trainer),
            n_rows=n_rows,
            step=step,
            first_number=self.n_episodes,
        )
        self.n_episodes += drawn.n_episodes
        return drawn

    def generate(self, prompts: Sequence[Any]) -> tuple[Any, ...]:
        """Return the episodes of these prompts in the form of TRL."""
        if self._drawn is None:
            rows = [{**row, "prompt": prompt} for row, prompt in zip(self._rows, prompts, strict=True)]
            batch = self._run(rows, self._mode) if self._ran is None else self._ran  # or they ran ahead
            self._ran = batch = batch.numbered(self._first_number(len(batch)))
            trajectories = batch.trajectories
        else:
            self._ran, trajectories = self._drawn.ran, self._drawn.trajectories
            batch = self._ran
        self._return_memory()
        if self._mode == "train":
            self._proof.hear(batch)
        self.rollout_seconds += batch.times.duration_s
        trl_seam.count_tokens(self._trainer, sum(len(t.prompt_ids) + len(t.ids) for t in batch.trajectories))
        self._segments = trl_batch.segments_of(self._trainer, trajectories)
        masks = self._signal.loss_masks(trajectories)
        output = GenerationOutput.from_trajectories(trajectories, self._pad_id, masks)
        self._off_policy.expect(output.logprobs)
        if not self._off_policy.skips_old_policy and trl_batch.reads_old_policy(self._trainer):
            self._ask_before_old_policy(prompts, output)
        return output.as_trl()

    def _return_memory(self) -> None:
        """Give back, on a CPU, what rollouts have left between the tensors of the passes to come."""
        if self._mode == "train" and self._args.device.type == "cpu":
            if maps_large_blocks() or self._n_rollouts % _SMALL_RUN_RETURNS == 0:
                give_memory_back()
            self._n_rollouts += 1

    def _first_number(self, n: int) -> int:
        """Return a number that no other episode of the run has,
        in any process, nor the n - 1 after it.
        """
        first = self.n_episodes + self._process * n
        self.n_episodes += self._n_processes * n
        return first

    def _ask_before_old_policy(self, prompts: Sequence[Any], output: GenerationOutput) -> None:
        """Ask the rewards that TRL would ask next but one, so that the old policy reads no group
        that they say is dead.
        """
        fields = [
            dict(zip(output.extra_fields, of, strict=True)) for of in zip(*output.extra_fields.values(), strict=True)
        ]
        inputs = [{**row, **own} for row, own in zip(self._rows, fields, strict=True)]
        self._asked_rewards = self._calculate_rewards(inputs, prompts, output.completions, output.completion_ids)
        self._row_choice = trl_batch.choose_rows_of_old_policy(self._trainer, self._in_dead_groups)

    def calculate_rewards(
        self, of_trl: Callable[..., torch.Tensor], inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """Return the rewards of all processes, which TRL is asked for unless they are known."""
        rewards_per_func, self._asked_rewards = self._asked_rewards, None
        if rewards_per_func is not None:
            return rewards_per_func
        if self._drawn is None:
            if trl_seam.has_reward_model(self._trainer):
                prompts = trl_jobs.as_conversations(prompts)  # it reads the whole conversation
            calculate = partial(of_trl, inputs, prompts, completions, completion_ids_list)
            with trl_jobs.point_to_messages(prompts):
                self._ran, rewards_per_func = self._signal.graded(self._ran, calculate)
            if self._ran is not None and self._mode == "train":
                self._ran = self._credit.asked(self._ran)
        else:  # they were asked as the groups ended
            rewards_per_func = reward_seam.answers_of(self._trainer, self._drawn)
            self._signal.hear_of(self._drawn.trajectories, rewards_per_func)
            self._credit.hear_of(self._drawn.trajectories, self._drawn.turn_rewards)
        self._in_dead_groups = trl_batch.in_dead_groups(
            self._trainer, self._signal.combined(self._mode), len(prompts), self._group_size(self._mode)
        )
        return rewards_per_func

    def _tell_of_batch(self, output: dict[str, Any]) -> None:
        """Let observers hear of the batch, now that its advantages are known."""
        batch, self._ran = self._ran, None
        trl_seam.log_dropped(self._trainer, output)
        if batch is None or not batch.is_graded:
            return
        if batch.mode == "train":
            trained = batch.trajectories if self._drawn is None else self._drawn.trajectories
            numbers = [int(trajectory.metadata["episode"]) for trajectory in trained]
            # A group that was drawn may be trained on in another process than the one it ran in.
            of_turns: Sequence[tuple[float, ...] | None] = self._credit.of_turns or [None] * len(numbers)
            own = dict(zip(numbers, zip(trl_batch.advantages_of(output), of_turns, strict=True), strict=True))
            parts = [own] if self._drawn is None else gather_object([own])
            advantages = {number: advantage for part in parts for number, advantage in part.items()}
            given = [advantages.get(int(t.metadata["episode"]), (None, None)) for t in batch.trajectories]
            batch = batch.with_advantages([advantage for advantage, _ in given], [of for _, of in given])
            self._rollouts.observers.batch_done(batch)
            self._token_tap.choose(batch, output, numbers)
            self._signal.check_dropped(batch)
        else:
            self._rollouts.observers.batch_done(batch)

    def compute_loss(self, inputs: dict[str, Any], of_trl: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the loss of a micro-batch, of the rows that have something to learn from."""
        self._row_choice = choice = trl_batch.choose_rows(self._trainer, inputs)
        self._segments = trl_batch.segments_in(self._trainer, inputs)
        self._logps = None
        try:
            with trl_batch.mean_entropy_of_live(self._trainer, inputs, choice):
                loss = of_trl()
            self._off_policy.heard(inputs, self._logps, None if choice is None else choice.live)
            return loss
        finally:
            self._row_choice = self._logps = self._segments = None

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
        known = self._off_policy.old_policy(input_ids, logits_to_keep)
        if known is not None:
            return known, None, None
        choice, segments = self._row_choice, self._segments
        if segments is not None:
            score = partial((segments if choice is None else segments.chosen(choice.live)).score, score)
        whole = (input_ids, attention_mask, logits_to_keep, *args)
        scored = score(*whole, **kwargs) if choice is None else choice.score(score, *whole, **kwargs)
        self._logps = scored[0]
        self._token_tap.hear(scored)
        return scored

    @property
    def _mode(self) -> Mode:
        return trl_seam.mode_of(self._trainer)
