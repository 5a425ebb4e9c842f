"""Turn-level credit in the order in which TRL passes by.

The functions are pure and in `toolgrpo/credit/`. Without credit by turn nothing happens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from toolgrpo.credit.options import Credit
from toolgrpo.credit.turn_rewards import TurnRewards
from toolgrpo.credit.turns import EpisodeTurns, turn_advantages, turn_metrics
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.trainer import trl_seam, trl_signal
from toolgrpo.trajectory import Trajectory


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
