"""Graded batches for a training: `CallsOfTRL` takes one after the other from `Batches`.

    take(rows)     TRL's rows are run with the current weights (`run`), or `StepGroups` takes groups of other rows:
                   `row_order.py` says which are next, `rollout/group_queue.py` holds the groups in flight. The
                   episodes are numbered, and graded once

`StepGroups.for_step`, in this order:

    hand over   the engine gets the weights of the last pass, with `max_staleness` between two of its steps
    take        sets are begun until those of this step and of the next ones are in the queue, and taken
                as the rule of admission says; those that are left over go on
    agree       which rows are gone, and which are in the queue, in every process

A set is a group, where groups are chosen one by one (`dynamic_sampling`): it is graded as it ends, and the queue goes by
its rewards. Else it is this process's slice of a whole batch, which is graded as a whole. With P sets of a process a step
and `max_staleness` k, (1 + k) P are in the queue, and a step takes the first P of them that are not dead.

Invariants: rewards are asked once per episode; the batch is what TRL would have had if its sampler had drawn the rows that
were admitted; every process takes as many rows, and gathers as often, as the others, and nothing collective happens
between hand over and agree; no set is trained on more than k + 1 steps after it began; every set is trained on or dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from toolgrpo.engines.base import Engine
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.evaluation.grading import Answers, Grading
from toolgrpo.learning.advantages import Shaping, is_dead, members_of
from toolgrpo.rollout.ahead import RolloutsAhead
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.rollout.group_queue import GroupQueue, GroupSet, Judge, TakenGroups, unjudged
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import timers_held
from toolgrpo.support.barrier import Processes
from toolgrpo.trainer.row_order import QueueRule, RowOf, RowOrder, Training, group_sets, slice_sets
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
class _GradedGroup:
    """A group that was graded as it ended."""

    group: RolloutBatch
    answers: Answers
    live: bool


@dataclass(frozen=True, slots=True)
class _SetFacts:
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
        groups: StepGroups | None = None,
    ) -> None:
        self.groups = groups
        self.grading = grading
        self._shaping = shaping
        self.n_episodes = 0  # of all processes, so far
        self.rollout_seconds = 0.0  # of what was trained on or evaluated, in this process
        self._run = run
        self.processes = processes

    def take(self, rows: Sequence[Row]) -> TakenBatch:
        """Return the episodes of these rows; where there is a queue, of the next rows in it."""
        groups, n_rows = self.groups, len(rows)
        if groups is not None and groups.options.replaces:
            return self._of_groups(groups.for_step(n_rows, self._judge), n_rows, groups)
        ran = self._run(rows) if groups is None else self._of_slice(groups.for_step(n_rows, unjudged), n_rows, groups)
        ran = self._numbered(ran, [n_rows] * self.processes.n)
        rows = [one.row for one in ran.episodes]
        with point_to_messages(rows):
            answers = self.grading.ask(rows, ran.trajectories, step=ran.step)
        graded = self.grading.graded(ran, answers)
        self.processes.meet()  # rewards may take long too
        return TakenBatch(graded, graded.episodes, answers)

    def evaluated(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch of an evaluation in all processes, with its numbers and its seconds among those of the run."""
        self.processes.meet()
        return self._numbered(batch, self.processes.gather([len(batch)]))

    def settle(self) -> None:
        """Wait until the engine is free for somebody else; what has ended is kept."""
        if self.groups is not None:
            self.groups.queue.settle()
            self.processes.meet()

    def begin_anew(self) -> None:
        """Go back to the first row."""
        if self.groups is not None:
            self.groups.order.begin_anew()

    def stop(self) -> None:
        """Cancel what is in the queue."""
        if self.groups is not None:
            self.groups.stop()

    def _numbered(self, batch: RolloutBatch, of_processes: Sequence[int]) -> RolloutBatch:
        """Count a batch; return it with a number for each episode that no other of the run has, in any process."""
        first = self.n_episodes + sum(of_processes[: self.processes.index])
        self.n_episodes += sum(of_processes)
        self.rollout_seconds += batch.times.duration_s
        return batch.numbered(first)

    def _of_slice(self, taken: TakenGroups[Any], n_rows: int, groups: StepGroups) -> RolloutBatch:
        self._agree([_SetFacts(one.group_set.places, len(one.trajectories)) for one in taken.sets], groups)
        episodes = [
            Scored(row, trajectory)
            for one in taken.sets
            for row, trajectory in zip(one.group_set.rows, one.trajectories, strict=True)
        ]
        return RolloutBatch(
            episodes=tuple(episodes),
            step=taken.step,
            times=taken.times,
            group_size=groups.options.group_size,
            offset=self.processes.index * n_rows,
        )

    async def _judge(self, group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> _GradedGroup:
        with point_to_messages(group_set.rows):
            answers = await self.grading.ask_beside(group_set.rows, trajectories)
        group = RolloutBatch(
            episodes=tuple(Scored(row, one) for row, one in zip(group_set.rows, trajectories, strict=True))
        )
        with timers_held():
            group = self.grading.graded(group, answers)
        live = not is_dead(self._shaping.rewards(members_of(group.episodes), len(group)))  # stages come later
        return _GradedGroup(group, answers, live)

    def _of_groups(self, taken: TakenGroups[_GradedGroup], n_rows: int, groups: StepGroups) -> TakenBatch:
        of_processes = self._agree([_facts_of(one.group_set, one.verdict) for one in taken.sets], groups)
        facts = list(chain.from_iterable(of_processes))
        episodes = [
            replace(one, trained=number in taken.admitted)
            for number, drawn in enumerate(taken.sets)
            for one in drawn.verdict.group.episodes
        ]
        size = groups.options.group_size
        ran = RolloutBatch(episodes=tuple(episodes), step=taken.step, times=taken.times, group_size=size)
        ran = self._numbered(ran, [sum(one.n_episodes for one in own) for own in of_processes])
        of_trl = [
            (
                ran.episodes[number * size + member],
                answers.values[member],
                {name: values[member] for name, values in answers.columns.items() if len(values) == size},
            )
            for number in taken.admitted
            for answers in [taken.sets[number].verdict.answers]
            for member in range(size)
        ]
        if n_rows % size:  # a group lies in the slices of two processes, and is trained on in both
            start = self.processes.index * n_rows
            of_trl = self.processes.gather(of_trl)[start : start + n_rows]
        columns = dict.fromkeys(name for _, _, own in of_trl for name in own)
        metrics = dict.fromkeys(name for one in taken.sets for name in one.verdict.answers.metrics)
        totals = list(chain.from_iterable(one.totals for one in facts))
        return TakenBatch(
            ran=ran,
            scored=tuple(one for one, _, _ in of_trl),
            answers=Answers(
                tuple(values for _, values, _ in of_trl),
                columns={name: [own.get(name) for _, _, own in of_trl] for name in columns},
                metrics={
                    name: list(chain.from_iterable(one.verdict.answers.metrics.get(name, ()) for one in taken.sets))
                    for name in metrics
                },
            ),
            metrics_of_all=_drawn_metrics(facts),
            reward=sum(totals) / len(totals) if totals else float("nan"),
        )

    def _agree(self, own: list[_SetFacts], groups: StepGroups) -> list[tuple[_SetFacts, ...]]:
        """Tell all processes what each has drawn, so that the order of rows moves on."""
        of_processes: list[tuple[_SetFacts, ...]] = self.processes.gather([tuple(own)])
        groups.agree(place for facts in of_processes for one in facts for place in one.places)
        return of_processes


def _facts_of(group_set: GroupSet, judged: _GradedGroup) -> _SetFacts:
    episodes = judged.group.episodes
    totals = tuple(one.total for one in episodes if one.total is not None)
    return _SetFacts(
        group_set.places,
        len(episodes),
        judged.live,
        tuple(bool(one.success) for one in episodes if one.success is not None),
        totals,
    )


def _drawn_metrics(facts: Sequence[_SetFacts]) -> dict[str, float]:
    dead = [one.successes for one in facts if not one.live]
    return {
        "sampling/groups_drawn": float(len(facts)),
        "sampling/dead_all_failed": float(sum(bool(successes) and not any(successes) for successes in dead)),
        "sampling/dead_all_solved": float(sum(bool(successes) and all(successes) for successes in dead)),
        "sampling/live_rate": 1 - len(dead) / len(facts),
    }


class StepGroups:
    """The groups that the steps of one run take, in one process."""

    def __init__(
        self,
        rollouts: Rollouts,
        order: RowOrder,
        row_of: RowOf,
        options: QueueRule,
        training: Training,
        processes: Processes,
    ) -> None:
        self.order = order
        self.options = options
        self._row_of = row_of
        self._training = training
        self._processes = processes
        ahead = RolloutsAhead(rollouts) if options.staleness else None
        self.queue: GroupQueue[Any] = GroupQueue(rollouts, ahead=ahead)
        self._queued: list[int] = []  # places of all processes' rows in the queue among those that are planned next

    def for_step(self, n_rows: int, judge: Judge[Any]) -> TakenGroups[Any]:
        """Return the sets of this process's share of a batch of `n_rows` rows a process."""
        options, processes, training, ahead = self.options, self._processes, self._training, self.queue.ahead
        step = training.load_weights() if ahead is None else training.step()
        if ahead is not None:
            ahead.hand_over(training.weights(), step, processes.meet)
        left = max(1, training.left())
        n_groups = n_rows * processes.n // options.group_size
        if options.replaces:
            own = len(range(processes.index, n_groups, processes.n))
            # The plan is that of the process with the most groups: with the same plan everywhere a place names a row.
            largest = options.rule(-(-n_groups // processes.n), left)
            rule, n_episodes = options.rule(own, left), own * options.group_size
            n_planned = min(processes.n, n_groups) * (largest.most + largest.beyond)
        else:
            rule, n_episodes = options.rule(1, left), n_rows
            n_planned = n_groups * (1 + rule.beyond)
        planned, queued = self.order.plan(len(self._queued) + n_planned), set(self._queued)
        free = [(place, number) for place, number in enumerate(planned) if place not in queued]
        if options.replaces:
            sets = group_sets(free, self._row_of, options.group_size, processes.index, min(processes.n, n_groups))
        else:
            share = slice(processes.index * n_rows, (processes.index + 1) * n_rows)
            sets = slice_sets(free, self._row_of, options.group_size, n_groups, share)
        began, event = time.monotonic(), RolloutBegan(n_episodes, step, "train", "episodes")
        if ahead is None:
            taken = self.queue.take(rule, options.sampling, event, sets=sets, judge=judge)
            processes.meet()
            return taken
        taken = self._all_or_none(partial(self.queue.take, rule, options.sampling, event, sets=sets, judge=judge))
        training.log(
            {
                "overlap/staleness": float(max(taken.staleness)),
                "overlap/waited": time.monotonic() - began,
                "overlap/batches_in_flight": len(self.queue) / rule.target,
            }
        )
        return taken

    def agree(self, used: Iterable[int]) -> None:
        """Say which of the planned rows are gone, in all processes."""
        gone = set(used)
        self.order.used(gone)
        self.queue.renumber(gone)
        if self.queue.ahead is not None:
            self._queued = list(chain.from_iterable(self._processes.gather([self.queue.places])))

    def stop(self) -> None:
        """Cancel what is in the queue."""
        self.queue.stop()
        self._queued = []

    def _all_or_none(self, take: Callable[[], TakenGroups[Any]]) -> TakenGroups[Any]:
        """Take something in every process; where one cannot, all save what was trained so far, and stop."""
        failure: Exception | None = None
        taken: list[TakenGroups[Any]] = []
        try:
            taken.append(take())
        except Exception as error:  # whatever ended it; it is raised below, when all know of it
            failure = error
        self._processes.meet()
        told = self._processes.gather([None if failure is None else f"{type(failure).__name__}: {failure}"])
        failed = next(((number, text) for number, text in enumerate(told) if text is not None), None)
        if failed is None:
            return taken[0]
        self.stop()
        if self._training.step():
            self._training.save()
        if failure is not None:
            raise failure
        raise PeerError(f"process {failed[0]} failed first, so this one cannot continue: {failed[1]}")


def check_engine(engine: Engine) -> None:
    """Raise ConfigError if an engine cannot draw while its policy is trained."""
    if engine.same_numbers_as_trainer:
        raise ConfigError(
            f"max_staleness needs an engine with weights of its own, but {engine.name} decodes with the trainer's, which "
            f"change while it samples; leave `engine` to the config, or max_staleness at 0"
        )


def open_groups(
    args: Any,
    rollouts: Rollouts,
    training: Training,
    processes: Processes,
    *,
    rows: Any,
    row_of: RowOf,
    order_of: Callable[[int, int], Sequence[int]],
) -> StepGroups | None:
    """Return the queue that a config asks for, or None where the rows of TRL's sampler are run as they come.

    `order_of(n_rows, epoch)` is the order of that sampler.
    """
    if not args.draws_groups and not args.runs_ahead:
        return None
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"dynamic_sampling and max_staleness draw rows by their numbers, but the training data is "
            f"{'missing' if rows is None else f'a {type(rows).__name__}, which has none and may end in the middle of a step'}; "
            f"load it whole (not as a stream), or leave these off"
        )
    options = QueueRule(
        sampling=args.sampling_options(),
        group_size=args.num_generations,
        replaces=args.draws_groups,
        most_groups=args.max_groups_drawn,
        staleness=args.max_staleness,
    )
    order = RowOrder(len(rows), lambda epoch: order_of(len(rows), epoch))
    return StepGroups(rollouts, order, row_of, options, training, processes)
