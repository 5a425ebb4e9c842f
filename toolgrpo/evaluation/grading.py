"""Ask rewards about episodes, in training and outside of it, and say which episodes succeeded.

A reward is called as TRL calls it: `prompts`, copies of the `completions`, `completion_ids`,
`trajectories`, every column as a list, `trainer_state`, `log_metric` and `log_extra`. Functions are
asked one after the other, then those that only wait, all at once.

Episodes that a tool, an environment or a reward dropped have no total and no success.

Not covered: reward models (modules of torch), which only a trainer can ask (`ask_model`).
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from toolgrpo.data.rows import measure_of
from toolgrpo.episode.dropped import Drop, DropCause, DropEpisode
from toolgrpo.episode.trajectory import Trajectory, with_observation
from toolgrpo.errors import ConfigError
from toolgrpo.rewards.base import Reward, rows_named, watched
from toolgrpo.rewards.guard import asked_in_thread
from toolgrpo.rollout.batch import Grade, RolloutBatch, Row, Scored, Success
from toolgrpo.rollout.scheduler import run_blocking, timers_held

Grader = Callable[..., Any]
"""A reward in TRL's form: `grader(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`."""

MADE_UP = "made_up"  # metadata of an episode that nobody played: what an error says in place of its row
_ROUNDING = 1e-6  # rewards are added up in fp32 in training
_NO_COLUMNS = ("prompt", "completion", "completion_ids", "trajectories")


def success_at(threshold: float) -> Success:
    """Return the one meaning of success: the measure that the row brings, else a reward of at least `threshold`."""

    def succeeded(episode: Scored) -> bool:
        measure = measure_of(episode.row)
        if measure is not None:
            return measure(episode.trajectory.completion(), episode.row)
        return episode.total is not None and episode.total >= threshold - _ROUNDING

    return succeeded


@dataclass(frozen=True, slots=True)
class Answers:
    """Rewards of some episodes: a value of each function (NaN: it does not score it), what they dropped and logged."""

    values: tuple[tuple[float, ...], ...] = ()
    drops: Mapping[int, DropEpisode] = field(default_factory=dict)  # by the place of the episode
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grading:
    """Rule by which the episodes of a run are graded. `ask_model` asks a reward that is a model of torch."""

    rewards: Sequence[Grader]
    weights: Sequence[float]
    succeeded: Success
    names: Sequence[str]
    state: Callable[[], Any] | None = None  # TRL's `trainer_state`
    ask_model: Callable[[int, Sequence[Any], Sequence[Any]], list[float]] | None = None

    def ask(self, rows: Sequence[Row], trajectories: Sequence[Trajectory], *, step: int = 0) -> Answers:
        """Ask every reward about these episodes."""
        if not rows:  # a process without a question: rewards need not bear an empty batch
            for number, reward in enumerate(self.rewards):
                if self.ask_model is not None and not isinstance(reward, Reward):
                    self.ask_model(number, (), ())  # the others may wait for this process in its pass
            return Answers()
        question = _Question(self, rows, trajectories, step)
        for number in question.plain:
            question.ask(number)
        if question.waiting:
            run_blocking(question.ask_waiting())
        return question.answers()

    async def ask_beside(self, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> Answers:
        """Do so on the loop of a rollout, whose timers count no plain reward, and which goes on beside the others."""
        question = _Question(self, rows, trajectories, step=0)
        with timers_held():
            for number in question.plain:
                question.ask(number)
        await question.ask_waiting()
        return question.answers()

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """Return a batch graded whole, as wherever held-out rows are measured."""
        return self.graded(batch, self.ask([one.row for one in batch.episodes], batch.trajectories, step=batch.step))

    def graded(self, batch: RolloutBatch, answers: Answers) -> RolloutBatch:
        """Return the batch with the rewards of each episode, their weighted sum, and whether it succeeded."""
        grades = [
            grade_of(
                trajectory,
                {name: None if math.isnan(value) else value for name, value in zip(self.names, values, strict=True)},
                sum(
                    weight * value for weight, value in zip(self.weights, values, strict=True) if not math.isnan(value)
                ),
                answers.drops.get(place),
            )
            for place, (trajectory, values) in enumerate(zip(batch.trajectories, answers.values, strict=True))
        ]
        return batch.graded(grades, self.succeeded)


def grade_of(
    trajectory: Trajectory, rewards: Mapping[str, float | None], total: float, dropped_by_reward: DropEpisode | None
) -> Grade:
    """Return what an episode is worth, or why that cannot be said."""
    drop = trajectory.dropped
    if drop is None and dropped_by_reward is not None:
        drop = dropped_by_reward.at(DropCause.REWARD)
    if drop is None and rewards and all(value is None for value in rewards.values()):
        drop = Drop(DropCause.NO_REWARD, "every reward function returned None")
    return Grade(rewards, total if drop is None else None, drop)


class _StateElsewhere:
    """Transformers' `TrainerState` outside of a training; it is imported where a reward reads more than the step."""

    def __init__(self, step: int) -> None:
        self.global_step = step

    def __getattr__(self, name: str) -> Any:
        from transformers import TrainerState

        return getattr(TrainerState(global_step=self.global_step), name)


def _asked(prompt: Any, trajectory: Trajectory) -> Any:
    """Return the prompt as the model was shown it: behind that of the row, what an environment said first."""
    observation = trajectory.metadata.get("observation")
    if not observation:
        return prompt
    return f"{prompt}{observation}" if isinstance(prompt, str) else with_observation(prompt, str(observation))


class _Question:
    """One question to all rewards, about the same episodes."""

    def __init__(self, grading: Grading, rows: Sequence[Row], trajectories: Sequence[Trajectory], step: int) -> None:
        self._rewards = watched(grading.rewards)
        self._rows = rows
        self._ask_model = grading.ask_model
        self._values: dict[int, list[float]] = {}
        self._drops: dict[int, DropEpisode] = {}
        self._columns: dict[str, list[Any]] = defaultdict(list)
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._arguments: dict[str, Any] = {
            **{key: [row.get(key) for row in rows] for key in rows[0] if key not in _NO_COLUMNS},
            "prompts": [_asked(row["prompt"], one) for row, one in zip(rows, trajectories, strict=True)],
            "completions": [one.completion() for one in trajectories],
            "completion_ids": [list(one.ids) for one in trajectories],
            "trajectories": list(trajectories),
            "trainer_state": _StateElsewhere(step) if grading.state is None else grading.state(),
            "log_metric": lambda name, value: self._metrics[name].append(value),
            "log_extra": lambda column, values: self._columns[column].extend(values),
        }
        self.waiting = [
            number for number, reward in enumerate(self._rewards) if isinstance(reward, Reward) and reward.is_async
        ]
        self.plain = [number for number in range(len(self._rewards)) if number not in self.waiting]

    async def ask_waiting(self) -> None:
        await asyncio.gather(*(asked_in_thread(partial(self.ask, number)) for number in self.waiting))

    def answers(self) -> Answers:
        in_order = [self._values[number] for number in range(len(self._rewards))]
        return Answers(tuple(zip(*in_order, strict=True)), self._drops, dict(self._columns), dict(self._metrics))

    def _row_name(self, place: int) -> str:
        from toolgrpo.data.load import place_of_row  # a trainer that is given its rows needs no reader of files

        made_up = self._arguments["trajectories"][place].metadata.get(MADE_UP)
        return str(made_up or place_of_row(self._rows[place]) or f"row {place}")

    def ask(self, number: int) -> None:
        """Ask one reward, in its thread."""
        reward = self._rewards[number]
        if not isinstance(reward, Reward):
            if self._ask_model is None:
                raise ConfigError(
                    f"{type(reward).__name__} is a reward model, which only TRL's trainer uses; give a function"
                )
            self._values[number] = self._ask_model(number, self._arguments["prompts"], self._arguments["completions"])
            return
        with rows_named(self._row_name):
            scores = reward(**self._arguments)
        for place, score in enumerate(scores):
            if isinstance(score, DropEpisode):
                self._drops.setdefault(place, score)
        self._values[number] = [score if isinstance(score, float) else math.nan for score in scores]


def grade(
    batch: RolloutBatch, rewards: Sequence[Grader], weights: Sequence[float] | None = None, *, threshold: float
) -> RolloutBatch:
    """Return the batch graded outside of a training."""
    names = [str(getattr(reward, "__name__", type(reward).__name__)) for reward in rewards]
    return Grading(rewards, weights or [1.0] * len(rewards), success_at(threshold), names).of(batch)
