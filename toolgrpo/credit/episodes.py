"""What the credit of turns is made from: an episode's outcome, and of each of its turns a reward and
the state that it began in.

Small, because processes send these to each other: a group may lie in two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from toolgrpo.credit.states import states_of
from toolgrpo.rollout.batch import RolloutBatch

__all__ = ["EpisodeTurns", "episode_turns", "in_groups"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeTurns:
    """One episode, turn by turn. `total` is its outcome; None: it is not scored, and teaches nothing."""

    total: float | None
    rewards: tuple[float, ...]  # one for each turn
    states: tuple[str, ...] = ()  # before each turn, where somebody asks; else empty

    @property
    def n_turns(self) -> int:
        return len(self.rewards)


def episode_turns(batch: RolloutBatch, *, with_states: bool = False) -> list[EpisodeTurns]:
    """Return the episodes of a graded batch; one without rewards by turn has none but its outcome."""
    return [
        EpisodeTurns(
            one.total,
            one.turn_rewards or (0.0,) * len(one.trajectory.turns),
            states_of(one.trajectory) if with_states else (),
        )
        for one in batch.episodes
    ]


def in_groups(values: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the episodes of each question, which stand together."""
    if len(values) % size:
        raise ValueError(f"{len(values)} episodes make no whole groups of {size}")
    return [values[start : start + size] for start in range(0, len(values), size)]
