"""One graded batch after the other: how a training comes by its episodes.

    take(rows)     TRL's rows are run with the current weights, or the next rows in the queue are taken
                   (`row_queue.py`); the episodes are numbered, and graded once

Where dead groups are replaced, a group is graded as it ends, and the queue goes by its rewards.
Else a batch is graded as a whole. A group that lies in the slices of two processes is dealt out whole.

Invariants: rewards are asked once per episode; the batch is what TRL would have had if its sampler had
drawn the rows that were admitted; every process takes as many rows, and gathers as often, as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.evaluation.grading import Answers, Grading
from toolgrpo.learning.advantages import is_dead
from toolgrpo.learning.shaping import Shaping, members_of
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.rollout.group_queue import GroupSet, TakenGroups, as_it_is
from toolgrpo.rollout.scheduler import timers_held
from toolgrpo.trainer.row_queue import Processes, RowQueue
from toolgrpo.trainer.trl_jobs import point_to_messages


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A generation batch of one process: the episodes that TRL scores, and all that ran for it.

    `answers` are what the rewards said of the scored ones. `metrics_of_all` are of all that ran, in
    all processes, with their mean `reward`; None: it was drawn to be trained on, all of it.
    """

    ran: RolloutBatch
    scored: tuple[Scored, ...]
    answers: Answers
    metrics_of_all: Mapping[str, float] | None = None
    reward: float = 0.0

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(one.trajectory for one in self.scored)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A group that was graded as it ended."""

    group: RolloutBatch
    answers: Answers
    live: bool


@dataclass(frozen=True, slots=True)
class _Fate:
    """Facts about a set of the queue that all processes share."""

    places: tuple[int, ...]
    n_episodes: int
    live: bool = True
    successes: tuple[bool, ...] = ()
    totals: tuple[float, ...] = ()  # of the episodes that were scored


class Batches:
    """The batches of one process. `run` plays an episode per row with the current weights, and `shaping` says by what
    a group is dead.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Row]], RolloutBatch],
        grading: Grading,
        shaping: Shaping,
        processes: Processes,
        queue: RowQueue | None = None,
    ) -> None:
        self.queue = queue
        self.grading = grading
        self._shaping = shaping
        self.n_episodes = 0  # of all processes, so far
        self.rollout_seconds = 0.0  # of what was trained on or evaluated, in this process
        self._run = run
        self.processes = processes

    def take(self, rows: Sequence[Row]) -> TakenBatch:
        """Return the episodes of these rows; where there is a queue, of the next rows in it."""
        queue = self.queue
        if queue is None:
            ran = self._numbered(self._run(rows), [len(rows)] * self.processes.n)
        elif not queue.options.replaces:
            ran = self._as_it_is(queue.take(len(rows), as_it_is), len(rows), queue)
        else:
            return self._judged(queue.take(len(rows), self._judge), len(rows), queue)
        self.rollout_seconds += ran.times.duration_s
        rows = [one.row for one in ran.episodes]
        with point_to_messages(rows):
            answers = self.grading.ask(rows, ran.trajectories, step=ran.step)
        graded = self.grading.graded(ran, answers)
        self.processes.meet()  # rewards may take long too
        return TakenBatch(graded, graded.episodes, answers)

    def evaluated(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch of an evaluation in all processes, with its numbers and its seconds among those of the run."""
        self.rollout_seconds += batch.times.duration_s
        return self._numbered(batch, self.processes.gather([len(batch)]))

    def _numbered(self, batch: RolloutBatch, of_processes: Sequence[int]) -> RolloutBatch:
        """Return the batch with a number for each episode that no other of the run has, in any process."""
        first = self.n_episodes + sum(of_processes[: self.processes.index])
        self.n_episodes += sum(of_processes)
        return batch.numbered(first)

    def _as_it_is(self, groups: TakenGroups[Any], n_rows: int, queue: RowQueue) -> RolloutBatch:
        self._agree([_Fate(one.group_set.places, len(one.trajectories)) for one in groups.sets], queue)
        episodes = [
            Scored(row, trajectory)
            for one in groups.sets
            for row, trajectory in zip(one.group_set.rows, one.trajectories, strict=True)
        ]
        batch = RolloutBatch(
            episodes=tuple(episodes),
            step=groups.step,
            times=groups.times,
            group_size=queue.options.group_size,
            offset=self.processes.index * n_rows,
        )
        return self._numbered(batch, [n_rows] * self.processes.n)

    async def _judge(self, group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> _Judged:
        with point_to_messages(group_set.rows):
            answers = await self.grading.ask_beside(group_set.rows, trajectories)
        group = RolloutBatch(
            episodes=tuple(Scored(row, one) for row, one in zip(group_set.rows, trajectories, strict=True))
        )
        with timers_held():
            group = self.grading.graded(group, answers)
        live = not is_dead(self._shaping.rewards(members_of(group.episodes), len(group)))  # stages come later
        return _Judged(group, answers, live)

    def _judged(self, groups: TakenGroups[_Judged], n_rows: int, queue: RowQueue) -> TakenBatch:
        of_processes = self._agree([_fate(one.group_set, one.verdict) for one in groups.sets], queue)
        fates = list(chain.from_iterable(of_processes))
        episodes = [
            replace(one, trained=number in groups.admitted)
            for number, drawn in enumerate(groups.sets)
            for one in drawn.verdict.group.episodes
        ]
        size = queue.options.group_size
        ran = RolloutBatch(episodes=tuple(episodes), step=groups.step, times=groups.times, group_size=size)
        ran = self._numbered(ran, [sum(fate.n_episodes for fate in own) for own in of_processes])
        self.rollout_seconds += ran.times.duration_s
        of_trl = [
            (
                ran.episodes[number * size + member],
                answers.values[member],
                {name: values[member] for name, values in answers.columns.items() if len(values) == size},
            )
            for number in groups.admitted
            for answers in [groups.sets[number].verdict.answers]
            for member in range(size)
        ]
        if n_rows % size:  # a group lies in two slices
            start = self.processes.index * n_rows
            of_trl = self.processes.gather(of_trl)[start : start + n_rows]
        columns = dict.fromkeys(name for _, _, own in of_trl for name in own)
        metrics = dict.fromkeys(name for one in groups.sets for name in one.verdict.answers.metrics)
        totals = list(chain.from_iterable(fate.totals for fate in fates))
        return TakenBatch(
            ran=ran,
            scored=tuple(one for one, _, _ in of_trl),
            answers=Answers(
                tuple(values for _, values, _ in of_trl),
                columns={name: [own.get(name) for _, _, own in of_trl] for name in columns},
                metrics={
                    name: list(chain.from_iterable(one.verdict.answers.metrics.get(name, ()) for one in groups.sets))
                    for name in metrics
                },
            ),
            metrics_of_all=_drawn_metrics(fates),
            reward=sum(totals) / len(totals) if totals else float("nan"),
        )

    def _agree(self, own: list[_Fate], queue: RowQueue) -> list[tuple[_Fate, ...]]:
        """Tell all processes what each has drawn, so that the order of rows moves on."""
        of_processes: list[tuple[_Fate, ...]] = self.processes.gather([tuple(own)])
        queue.agree(place for fates in of_processes for fate in fates for place in fate.places)
        return of_processes


def _fate(group_set: GroupSet, judged: _Judged) -> _Fate:
    episodes = judged.group.episodes
    totals = tuple(one.total for one in episodes if one.total is not None)
    return _Fate(group_set.places, len(episodes), judged.live, tuple(bool(one.success) for one in episodes), totals)


def _drawn_metrics(fates: Sequence[_Fate]) -> dict[str, float]:
    dead = [fate.successes for fate in fates if not fate.live]
    return {
        "sampling/groups_drawn": float(len(fates)),
        "sampling/dead_all_failed": float(sum(not any(successes) for successes in dead)),
        "sampling/dead_all_solved": float(sum(all(successes) for successes in dead)),
        "sampling/live_rate": 1 - len(dead) / len(fates),
    }
