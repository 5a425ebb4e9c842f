"""`RolloutBatch`: the episodes of one rollout, in groups, each with what it was worth.

This is the value that everything after a rollout takes: grading, metrics, the recording, tables,
evaluation. It is made by `Rollouts.run` without rewards and completed by `graded`, and in training by
`with_advantages`.

Invariants: episodes stand in the order of the rows that were asked; those of one question stand
together; a batch never changes: `numbered`, `graded` and `with_advantages` give new ones. Of a
graded episode, either `total` and `success` are given, or it was dropped and `drop` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from toolgrpo.episode.dropped import Drop
from toolgrpo.episode.trajectory import Trajectory

Row = Mapping[str, Any]
"""One row of the data: `prompt`, and every other column."""

Mode = Literal["train", "eval", "heldout"]
"""What a rollout is for: training, an evaluation,
or held-out questions before and after a training.
"""

Success = Callable[["Scored"], bool]
"""Says of a graded episode whether it succeeded."""


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """Times of a rollout."""

    duration_s: float = 0.0
    engine_idle_s: float = 0.0  # time in which no episode was waiting for the engine
    started_s: float = 0.0  # on the clock of the trajectories' own `started_s`


@dataclass(frozen=True, slots=True)
class Grade:
    """Grade of one episode:
    each reward by its name (None: it does not score this episode), and their weighted sum.

    An episode that cannot be scored has no sum, and a `drop`.
    """

    rewards: Mapping[str, float | None]
    total: float | None
    drop: Drop | None = None

    def __post_init__(self) -> None:
        if (self.total is None) != (self.drop is not None):
            raise ValueError("an episode has a total or a drop, and not both")


@dataclass(frozen=True, slots=True)
class Scored:
    """One episode: the row it came from, what happened,
    and what it was worth (None: not graded yet, or dropped).
    """

    row: Row
    trajectory: Trajectory
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    total: float | None = None
    success: bool | None = None
    drop: Drop | None = None
    advantage: float | None = None  # None: nothing is trained on it, or not known yet
    trained: bool = True  # or it was drawn, and left out of the batch
    turn_rewards: tuple[float, ...] | None = None  # one for each turn; None: nobody gives any
    turn_advantages: tuple[float, ...] | None = None  # likewise; None: each turn has its episode's


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The episodes of one rollout of one process.

    `offset` is the place of the first one among the episodes of all processes: a group may be
    shared by two processes.
    """

    episodes: tuple[Scored, ...]
    step: int = 0
    mode: Mode = "train"
    times: RolloutTimes = RolloutTimes()
    group_size: int = 1
    offset: int = 0

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(episode.trajectory for episode in self.episodes)

    @property
    def is_graded(self) -> bool:
        return all(episode.total is not None or episode.drop is not None for episode in self.episodes)

    @property
    def scored(self) -> tuple[Scored, ...]:
        """Return the graded episodes that were not dropped."""
        self._check_graded()
        return tuple(episode for episode in self.episodes if episode.drop is None)

    @property
    def totals(self) -> tuple[float | None, ...]:
        """Return the weighted reward of each episode; None for one that was dropped."""
        self._check_graded()
        return tuple(episode.total for episode in self.episodes)

    @property
    def successes(self) -> tuple[bool, ...]:
        """Return whether each episode that was not dropped succeeded."""
        return tuple(bool(episode.success) for episode in self.scored)

    def groups(self) -> tuple[tuple[Scored, ...], ...]:
        """Return the episodes of each question.

        A group that is shared with other processes has this process's part only.
        """
        bounds = [0, *range(self.group_size - self.offset % self.group_size, len(self.episodes), self.group_size)]
        ends = [*bounds[1:], len(self.episodes)]
        return tuple(self.episodes[start:end] for start, end in zip(bounds, ends, strict=True) if start < end)

    def numbered(self, first: int) -> RolloutBatch:
        """Return the batch with a number for each episode, from `first` on,
        in the metadata of its trajectory.
        """
        return replace(
            self,
            episodes=tuple(
                replace(one, trajectory=replace(trajectory, metadata={**trajectory.metadata, "episode": number}))
                for number, one in enumerate(self.episodes, start=first)
                for trajectory in [one.trajectory]
            ),
        )

    def graded(self, grades: Sequence[Grade], succeeded: Success) -> RolloutBatch:
        """Return the batch with what each episode is worth.

        `succeeded` is asked about each of them that was not dropped.
        """
        graded = [
            replace(one, rewards=grade.rewards, total=grade.total, drop=grade.drop)
            for one, grade in zip(self.episodes, grades, strict=True)
        ]
        return replace(
            self,
            episodes=tuple(one if one.drop is not None else replace(one, success=succeeded(one)) for one in graded),
        )

    def with_advantages(
        self,
        advantages: Sequence[float | None],
        of_turns: Sequence[tuple[float, ...] | None] | None = None,
        turn_rewards: Sequence[tuple[float, ...] | None] | None = None,
    ) -> RolloutBatch:
        """Return the batch with the advantage of each episode, and of its turns where these differ;
        None: it is not trained on.
        """
        nothing = [None] * len(self.episodes)
        columns = (advantages, of_turns or nothing, turn_rewards or nothing)
        return replace(
            self,
            episodes=tuple(
                replace(one, advantage=advantage, turn_advantages=by_turn, turn_rewards=given)
                for one, advantage, by_turn, given in zip(self.episodes, *columns, strict=True)
            ),
        )

    def _check_graded(self) -> None:
        if not self.is_graded:
            raise ValueError("this batch was not graded yet; ask for its rewards after `graded`")
