"""What the trainer's batches teach: which episodes are dropped, what the others' advantages are, and which
tokens are trained on.

The parts are pure functions of `toolgrpo/signal/`; here they are called in the order in which TRL
comes by, and hold what one call leaves for a later one of the same batch.

Invariant: with the defaults and without dropped episodes TRL's own tensors go through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from toolgrpo.credit.options import Credit
from toolgrpo.credit.turn_rewards import TurnRewards
from toolgrpo.credit.turns import EpisodeTurns, turn_advantages, turn_metrics
from toolgrpo.evaluation.grading import success_at
from toolgrpo.rewards.unscored import noted_drops
from toolgrpo.rollout.batch import Mode, RolloutBatch, Scored
from toolgrpo.signal.dropped import check_dropped_share
from toolgrpo.signal.shaping import Member, loss_mask, members_of
from toolgrpo.trainer import trl_seam, trl_signal
from toolgrpo.trainer.config import ToolGRPOConfig
from toolgrpo.trajectory import Trajectory

# Turn-level credit in the order in which TRL passes by.
#
# The functions are pure and in `toolgrpo/credit/`. Without credit by turn nothing happens here.


class BatchCredit:
    """One trainer's; it hands the trainer on to TRL's seams."""

    def __init__(self, trainer: Any, credit: Credit, rewards: TurnRewards, group_size: int) -> None:
        self.of_turns: list[tuple[float, ...]] | None = None  # of this process's rows
        self._trainer = trainer
        self._credit = credit
        self._rewards = rewards
        self._group_size = group_size
        self._trajectories: Sequence[Trajectory] = ()  # of this process, of the batch that was graded last
        self._turns: list[EpisodeTurns] = []  # of all processes, without their rewards yet

    def asked(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with its rewards by turn."""
        if not self._credit.by_turn:
            return batch
        rewards = self._rewards([one.row for one in batch.episodes], batch.trajectories)
        self.hear_of(batch.trajectories, rewards)
        return batch.with_turn_rewards(rewards)

    def hear_of(self, trajectories: Sequence[Trajectory], rewards: Sequence[tuple[float, ...] | None]) -> None:
        """Take the rewards by turn of a batch that was asked before."""
        if not self._credit.by_turn:
            return
        self._trajectories = trajectories
        self._turns = gather_object(
            [
                EpisodeTurns(None, (0.0,) * len(one.turns) if of is None else of)
                for one, of in zip(trajectories, rewards, strict=True)
            ]
        )

    def applied(self, output: dict[str, Any], totals: Sequence[float | None]) -> dict[str, Any]:
        """Return TRL's batch with an advantage for each token; `totals` are the rewards of all processes."""
        heard, self._turns, self.of_turns = self._turns, [], None
        if not heard:
            return output
        turns = [replace(one, total=total) for one, total in zip(heard, totals, strict=True)]
        advantages = turn_advantages(turns, self._group_size, self._credit.scale)
        trl_seam.log_metrics(self._trainer, turn_metrics(turns, advantages, self._group_size))
        self.of_turns = trl_signal.own_part(self._trainer, advantages, len(self._trajectories))
        return trl_signal.with_turn_advantages(output, self._trajectories, self.of_turns)


class BatchSignal:
    """One trainer's, which is only handed on to TRL's seams.

    `group_size` says how many episodes of a question there are.
    """

    def __init__(self, trainer: Any, args: ToolGRPOConfig, group_size: Callable[[Mode], int]) -> None:
        self._trainer = trainer
        self._args = args
        self._group_size = group_size
        self._shaping = args.shaping()
        self._members: list[Member] = []  # of all processes, of the batch that was graded last
        self._outcomes: list[float | None] = []  # likewise, as advantages were made from them

    def loss_masks(self, trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
        """Return which tokens of a new batch are trained on."""
        return [loss_mask(trajectory, self._shaping.void_turns) for trajectory in trajectories]

    def graded(
        self, batch: RolloutBatch | None, calculate: Callable[[], torch.Tensor]
    ) -> tuple[RolloutBatch | None, torch.Tensor]:
        """Ask the rewards; return the graded batch and the rewards as TRL shall have them.

        They are of all processes, and those of dropped episodes are NaN.
        """
        with noted_drops() as dropped, trl_signal.quiet_about_unscored():
            rewards_per_func = calculate()
        if batch is None:
            return None, rewards_per_func
        grades = trl_signal.own_grades(self._trainer, rewards_per_func, batch.trajectories, dropped)
        batch = batch.graded(grades, success_at(self._args.success_threshold))
        self._members = gather_object(members_of(batch))
        return batch, trl_signal.without_dropped(rewards_per_func, self._members)

    def hear_of(self, trajectories: Sequence[Trajectory], rewards_per_func: torch.Tensor) -> None:
        """Take a batch that was graded elsewhere; NaN alone are the rewards of dropped episodes."""
        grades = trl_signal.own_grades(self._trainer, rewards_per_func, trajectories, {})
        episodes = tuple(Scored({}, one) for one in trajectories)
        graded = RolloutBatch(episodes=episodes).graded(
            grades, lambda episode: False
        )  # who succeeded is known elsewhere
        self._members = gather_object(members_of(graded))

    def combined(self, mode: Mode) -> list[float | None]:
        """Return the rewards that advantages are made from, of all processes."""
        return self._shaping.rewards(self._members, self._group_size(mode))

    def check_dropped(self, batch: RolloutBatch) -> None:
        """Raise, in every process, if too many of the episodes that ran for a training batch were dropped."""
        if batch.mode == "train":
            drops = gather_object([one.drop for one in batch.episodes])
            check_dropped_share(drops, self._args.max_dropped_share)

    def applied(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return TRL's batch with the advantages and masks that the config asks for."""
        shaped = None
        self._outcomes = [member.total for member in self._members]
        if not self._shaping.is_of_trl:
            shaped = self._shaping.advantages(self._members, self._group_size(trl_seam.mode_of(self._trainer)))
            trl_seam.log_metrics(self._trainer, shaped.metrics)
            self._outcomes = list(shaped.totals)
        advantages = None if shaped is None else shaped.advantages
        return trl_signal.with_advantages(self._trainer, output, self._members, advantages)

    @property
    def outcomes(self) -> list[float | None]:
        """What the episodes of all processes are worth, less what was taken off; None: dropped."""
        return self._outcomes
