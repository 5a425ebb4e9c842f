"""What k episodes per question of the untrained model say about a training that is to come.

Pure functions of a graded batch; `toolgrpo check` shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from toolgrpo.calls import RUNNABLE
from toolgrpo.evaluation.grading import Grader, grade
from toolgrpo.evaluation.measures import pass_at_k
from toolgrpo.rewards.gold import GoldEpisode, as_answer, as_boxed_answer, as_program, as_result_and_answer
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.signal.advantages import is_dead
from toolgrpo.trajectory import Message, StopReason, Trajectory

_ENOUGH = 8  # episodes of a task, to say of it that none succeeds


# Episodes that nobody drew, to ask rewards about: one that gives the gold answer, one of nonsense.
#
# Not covered: rewards that look at tokens, turns or the state of an environment; of those nothing can
# be said without a real episode.

NONSENSE = "I would rather talk about the weather."


WRITINGS: Mapping[str, GoldEpisode] = {
    "alone": as_answer,
    "in a box": as_boxed_answer,
    "after a tool's result": as_result_and_answer,
    "as a program": as_program,
}
"""How a gold answer may be written down."""


def nonsense(row: Row) -> list[Message]:
    return [{"role": "assistant", "content": NONSENSE}]


def score_made_up(
    rows: Sequence[Row],
    write: GoldEpisode,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None,
    threshold: float,
) -> RolloutBatch:
    """Return these rows graded, each with the episode that `write` makes of it."""
    episodes = tuple(Scored(row, _episode(write(row))) for row in rows)
    return grade(RolloutBatch(episodes=episodes), rewards, weights, threshold=threshold)


def _episode(messages: list[Message]) -> Trajectory:
    made: dict[str, Any] = {"prompt_ids": (0,), "ids": (), "mask": (), "logprobs": (), "turns": ()}
    return Trajectory(**made, messages=tuple(messages), stop_reason=StopReason.FINISHED)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers."""

    median: float
    p95: float
    largest: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(0.0, 0.0, 0.0, 0)
        return cls(median(values), quantile(values, 0.95), max(values), len(values))

    def __str__(self) -> str:
        return f"median {self.median:.0f}, 95 % within {self.p95:.0f}, longest {self.largest:.0f}"


@dataclass(frozen=True, slots=True)
class Untrained:
    """The facts about n questions with k episodes each."""

    n: int
    k: int
    episodes: int
    calling: float  # share of episodes with a well-formed call
    calls: int
    malformed: Counter[str]  # calls that could not be run, by cause
    failed: Counter[str]  # calls that ran and failed, by cause
    stops: Counter[str]
    rewards: tuple[float, ...]
    live: float  # share of the groups whose rewards differ
    pass_1: float
    pass_k: float
    never: Mapping[str, int]  # tasks of which no episode succeeds, and how many there were, beside others that do

    @property
    def all_failed(self) -> bool:
        return self.live == 0 and self.pass_k == 0

    @property
    def all_solved(self) -> bool:
        return self.live == 0 and self.pass_1 == 1


def untrained_facts(batch: RolloutBatch, k: int) -> Untrained:
    """Return what the batch says; the k episodes of a question stand together in it."""
    groups = [batch.episodes[start : start + k] for start in range(0, len(batch), k)]
    attempts = [attempt for trajectory in batch.trajectories for attempt in trajectory.attempts]
    results = [result for trajectory in batch.trajectories for result in trajectory.results]
    malformed = Counter(a.status.value for a in attempts if a.status not in RUNNABLE)
    return Untrained(
        n=len(groups),
        k=k,
        episodes=len(batch),
        calling=fmean(_calls_well(episode) for episode in batch.episodes),
        calls=len(attempts),
        malformed=malformed,
        failed=Counter(r.error.value for r in results if r.error is not None and r.error.value not in malformed),
        stops=Counter(t.stop_reason.value for t in batch.trajectories),
        rewards=tuple(total for total in batch.totals if total is not None),
        live=fmean(not is_dead([episode.total for episode in group]) for group in groups),
        pass_1=fmean(batch.successes),
        pass_k=fmean(pass_at_k(_successes(group), len(group), len(group)) for group in groups),
        never=_never_solved(batch.episodes),
    )


def _never_solved(episodes: Sequence[Scored]) -> dict[str, int]:
    """Return the tasks (of the rows' column `task`) without a success; none where nothing succeeds at all."""
    asked, solved = Counter[str](), Counter[str]()
    for episode in episodes:
        task = episode.row.get("task")
        if task is not None:
            asked[str(task)] += 1
            solved[str(task)] += bool(episode.success)
    return {task: n for task, n in asked.items() if n >= _ENOUGH and not solved[task]} if solved.total() else {}


def quantile(values: Collection[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _calls_well(episode: Scored) -> bool:
    return any(attempt.status in RUNNABLE for attempt in episode.trajectory.attempts)


def _successes(group: Sequence[Scored]) -> int:
    return sum(bool(episode.success) for episode in group)
