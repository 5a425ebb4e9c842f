"""What each turn of a training batch gets of its episode's worth: asked once, applied once.

The parts are pure functions of `toolgrpo/credit/`; here they are called in the order in which TRL
comes by. With `credit: episode` nothing happens, and TRL's advantages stay one for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from toolgrpo.credit.episodes import EpisodeTurns
from toolgrpo.credit.options import Credit
from toolgrpo.credit.states import states_of
from toolgrpo.credit.turn_metrics import turn_metrics
from toolgrpo.credit.turn_rewards import TurnWorth
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.trainer import trl_credit, trl_seam
from toolgrpo.trajectory import Trajectory

__all__ = ["BatchCredit"]


class BatchCredit:
    """One trainer's, which is only handed on to TRL's seams."""

    def __init__(self, trainer: Any, credit: Credit, worth: TurnWorth, group_size: int) -> None:
        self.of_turns: list[tuple[float, ...]] | None = None  # of this process's rows, as they are trained on
        self._trainer = trainer
        self._credit = credit
        self._worth = worth
        self._group_size = group_size
        self._trajectories: Sequence[Trajectory] = ()  # of this process, of the batch that was graded last
        self._turns: list[EpisodeTurns] = []  # of all processes; their outcomes are known later

    def asked(self, batch: RolloutBatch) -> RolloutBatch:
        """Ask the rewards by turn about a batch; return it with what they say."""
        if self._credit.is_of_episode:
            return batch
        rewards = self._worth([one.row for one in batch.episodes], batch.trajectories)
        self.hear_of(batch.trajectories, rewards)
        return batch.with_turn_rewards(rewards) if self._worth.sources else batch

    def hear_of(self, trajectories: Sequence[Trajectory], rewards: Sequence[tuple[float, ...] | None]) -> None:
        """Take the rewards by turn of a batch, which were asked before."""
        if self._credit.is_of_episode:
            return
        self._trajectories = trajectories
        own = [
            EpisodeTurns(
                None,
                (0.0,) * len(one.turns) if of is None else of,
                states_of(one) if self._credit.wants_states else (),
            )
            for one, of in zip(trajectories, rewards, strict=True)
        ]
        self._turns = gather_object(own)

    def applied(self, output: dict[str, Any], outcomes: Sequence[float | None]) -> dict[str, Any]:
        """Return TRL's batch with an advantage for each token; `outcomes` are those of all processes."""
        heard, self._turns, self.of_turns = self._turns, [], None
        if self._credit.is_of_episode or not heard:
            return output
        turns = [replace(one, total=total) for one, total in zip(heard, outcomes, strict=True)]
        of_episodes = trl_credit.advantages_of_all(self._trainer, output)
        advantages = self._credit.advantages(turns, self._group_size, of_episodes)
        trl_seam.log_metrics(self._trainer, turn_metrics(turns, advantages, self._group_size))
        self.of_turns = trl_credit.own_part(self._trainer, output, advantages)
        return trl_credit.with_turn_advantages(output, self._trajectories, self.of_turns)
