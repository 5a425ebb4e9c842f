"""What k episodes per question of the untrained model say about a training that is to come.

Pure functions of a graded batch; `toolgrpo check` shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from toolgrpo.evaluation.measures import pass_at_k
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.signal.dead_groups import is_dead
from toolgrpo.trajectory import AttemptStatus

__all__ = ["Spread", "Untrained", "quantile", "untrained_facts"]


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
    malformed = Counter(a.status.value for a in attempts if a.status is not AttemptStatus.OK)
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
    )


def quantile(values: Collection[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _calls_well(episode: Scored) -> bool:
    return any(attempt.status is AttemptStatus.OK for attempt in episode.trajectory.attempts)


def _successes(group: Sequence[Scored]) -> int:
    return sum(bool(episode.success) for episode in group)
