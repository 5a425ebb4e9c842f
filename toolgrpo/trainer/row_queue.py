"""The rows of a training that are drawn here, in place of TRL's sampler, and the groups that run for them.

One call of `draw`, then of `agree`, is one generation batch. In this order:

    hand over   the engine gets the weights of the last pass, with `max_staleness` between two of its steps
    draw        sets are begun until those of this step and of the next ones are in the queue, and taken
                as the rule of admission says; those that are left over go on
    agree       which rows are gone, and which are in the queue, in every process

A set is a group, where groups are chosen one by one (`dynamic_sampling`), and else this process's slice of a
whole batch. With P sets of a process a step and `max_staleness` k, (1 + k) P are in the queue, and a step takes the
first P of them that are not dead.

Invariants: every process has the same order of rows, and runs whole sets of its own; no set is
trained on more than k + 1 steps after it began; every set is trained on or dead; a row that was planned
but not used is the first of the next step; a checkpoint knows the rows that are gone, and what was in the queue
is drawn anew, with the same rows; nothing collective happens between hand over and agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from accelerate.utils import gather_object

from toolgrpo.engines.base import Engine, SamplingOptions
from toolgrpo.errors import ConfigError, PeerError
from toolgrpo.rollout.ahead import RolloutsAhead
from toolgrpo.rollout.batch import Row
from toolgrpo.rollout.group_queue import Admission, GroupQueue, GroupSet, GroupVerdict, Judge, TakenGroups
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.support.barrier import wait_for_the_slowest

T = TypeVar("T")
V = TypeVar("V", bound=GroupVerdict)


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among all of a run. `gather` gives the lists of all, in their order; `meet` comes before
    what is collective after a rollout.
    """

    n: int = 1
    index: int = 0
    gather: Callable[[list[Any]], list[Any]] = gather_object
    meet: Callable[[], None] = wait_for_the_slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Rule for beginning and taking groups. `most_groups`: so many times the groups of a step at most."""

    sampling: SamplingOptions
    group_size: int
    replaces: bool = False  # dead groups; so groups are taken one by one, and not whole batches
    most_groups: float = 1.0
    staleness: int = 0

    @property
    def runs_ahead(self) -> bool:
        return self.staleness > 0

    def rule(self, target: int, left: int) -> Admission:
        """Return how a step takes `target` sets, if `left - 1` others follow it."""
        most = self.most_groups if self.replaces else 1.0
        return Admission.of(target, max_groups_drawn=most, beyond=min(self.staleness, left - 1) * target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Facts about the training that a line draws for."""

    step: Callable[[], int]
    left: Callable[[], int]  # batches to come, this one included
    weights: Callable[[], Iterable[tuple[str, Any]]]
    load_weights: Callable[[], int]  # into an engine that draws nothing now
    save: Callable[[], None]  # a checkpoint
    log: Callable[[Mapping[str, float]], None]


class RowOrder:
    """The rows still to be drawn. `order_of(epoch)` is the permutation of a pass over the data."""

    def __init__(self, n_rows: int, order_of: Callable[[int], Sequence[int]]) -> None:
        self._n_rows = n_rows
        self._order_of = order_of
        self._place = 0  # in the endless sequence of passes
        self._held: list[int] = []  # planned before, not used
        self._pass: tuple[int, Sequence[int]] | None = None
        self._planned: list[tuple[int, int | None]] = []

    def plan(self, n: int) -> list[int]:
        """Return the next n rows, none of them used yet."""
        self._planned = [(row, None) for row in self._held[:n]]
        place = self._place
        while len(self._planned) < n:
            row, place = self._row_at(place), place + 1
            self._planned.append((row, place))
        return [row for row, _ in self._planned]

    def used(self, numbers: Iterable[int]) -> None:
        """Say which of the planned rows were drawn; the others stay for later."""
        drawn = set(numbers)
        last = max(drawn, default=-1)
        held_before = sum(place is None for _, place in self._planned)
        places = [place for _, place in self._planned[: last + 1] if place is not None]
        self._place = places[-1] if places else self._place
        passed_over = [row for number, (row, _) in enumerate(self._planned[: last + 1]) if number not in drawn]
        self._held = [*passed_over, *self._held[min(held_before, last + 1) :]]
        self._planned = []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        epoch, position = divmod(self._place, self._n_rows)
        return {"epoch": epoch, "position": position, "held": list(self._held)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, also in a version that kept more."""
        self._place = state["epoch"] * self._n_rows + state["position"]
        self._held = list(state["held"])

    def _row_at(self, place: int) -> int:
        epoch, position = divmod(place, self._n_rows)
        if self._pass is None or self._pass[0] != epoch:
            self._pass = (epoch, self._order_of(epoch))
        return int(self._pass[1][position])


class RowQueue:
    """The line of one run, in one process. `row_of` gives a row of the training data by its number."""

    def __init__(
        self,
        rollouts: Rollouts,
        order: RowOrder,
        row_of: Callable[[int], Row],
        options: QueueOptions,
        training: Training,
        processes: Processes,
    ) -> None:
        self.order = order
        self.options = options
        self._row_of = row_of
        self._training = training
        self._processes = processes
        ahead = RolloutsAhead(rollouts) if options.runs_ahead else None
        self._queue: GroupQueue[Any] = GroupQueue(rollouts, ahead=ahead)
        self._queued: list[int] = []  # places of all processes' rows in the queue among those that are planned next
        self._planned: list[int] = []

    def take(self, n_rows: int, judge: Judge[V]) -> TakenGroups[V]:
        """Return the sets of this process's share of a batch of `n_rows` rows a process."""
        options, processes, training = self.options, self._processes, self._training
        step = self._hand_over()
        left = max(1, training.left()) if options.runs_ahead else 1
        n_groups = n_rows * processes.n // options.group_size
        if options.replaces:
            own = len(range(processes.index, n_groups, processes.n))
            largest = options.rule(-(-n_groups // processes.n), left)
            rule, n_episodes = options.rule(own, left), own * options.group_size
            n_planned = min(processes.n, n_groups) * (largest.most + largest.beyond)
        else:
            rule, n_episodes = options.rule(1, left), n_rows
            n_planned = n_groups * (1 + rule.beyond)
        self._planned = self.order.plan(len(self._queued) + n_planned)
        began = time.monotonic()

        def take() -> TakenGroups[V]:
            return self._queue.take(
                rule,
                options.sampling,
                RolloutBegan(n_episodes, step, "train", "episodes"),
                sets=self._groups(min(processes.n, n_groups)) if options.replaces else self._slices(n_groups, n_rows),
                judge=judge,
            )

        if not options.runs_ahead:
            taken = take()
            processes.meet()
            return taken
        taken = self._all_or_none(take)
        training.log(
            {
                "overlap/staleness": float(max(taken.staleness)),
                "overlap/waited": time.monotonic() - began,
                "overlap/batches_in_flight": len(self._queue) / rule.target,
            }
        )
        return taken

    def agree(self, used: Iterable[int]) -> None:
        """Say which of the planned rows are gone, in all processes."""
        gone = set(used)
        self.order.used(gone)
        self._queue.renumber(gone)
        if self.options.runs_ahead:
            self._queued = list(chain.from_iterable(self._processes.gather([self._queue.places])))

    def settle(self) -> None:
        """Wait until the engine is free for somebody else; what has ended is kept."""
        self._queue.settle()

    def stop(self) -> None:
        """Cancel what is in the queue."""
        self._queue.stop()
        self._queued = []

    def _hand_over(self) -> int:
        """Give the engine the weights of now; return their step."""
        ahead, training = self._queue.ahead, self._training
        if ahead is None:
            return training.load_weights()
        step = training.step()
        ahead.hand_over(training.weights(), step)
        return step

    def _free(self) -> list[int]:
        """Return the places of the planned rows that nobody has begun."""
        taken = set(self._queued)
        return [place for place in range(len(self._planned)) if place not in taken]

    def _groups(self, n_sharing: int) -> Iterator[GroupSet]:
        """Give the groups that this process begins: the first processes, that have any, have one in turn."""
        for place in self._free()[self._processes.index :: n_sharing]:
            yield GroupSet((place,), (self._row_of(self._planned[place]),) * self.options.group_size)

    def _slices(self, n_groups: int, n_rows: int) -> Iterator[GroupSet]:
        """Give this process's slice of one batch after the other; a group may lie in two slices."""
        first, free = self._processes.index * n_rows, self._free()
        for start in range(0, len(free), n_groups):
            places = tuple(free[start : start + n_groups])
            rows = [self._row_of(self._planned[place]) for place in places for _ in range(self.options.group_size)]
            yield GroupSet(places, tuple(rows[first : first + n_rows]))

    def _all_or_none(self, take: Callable[[], T]) -> T:
        """Take something in every process; where one cannot, all save what was trained so far, and stop."""
        failure: Exception | None = None
        taken: list[T] = []
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
        raise PeerError(f"process {failed[0]} failed first, so this one cannot go on: {failed[1]}")


def check_engine(engine: Engine) -> None:
    """Raise ConfigError if an engine cannot draw while its policy is trained."""
    if engine.same_numbers_as_trainer:
        raise ConfigError(
            f"max_staleness needs an engine with weights of its own, but {engine.name} decodes with the trainer's, which "
            f"change while it draws; leave `engine` to the config, or max_staleness at 0"
        )


def open_queue(
    args: Any,
    rollouts: Rollouts,
    training: Training,
    processes: Processes,
    *,
    rows: Any,
    row_of: Callable[[int], Row],
    order_of: Callable[[int, int], Sequence[int]],
) -> RowQueue | None:
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
    options = QueueOptions(
        sampling=args.sampling_options(),
        group_size=args.num_generations,
        replaces=args.draws_groups,
        most_groups=args.max_groups_drawn,
        staleness=args.max_staleness,
    )
    order = RowOrder(len(rows), lambda epoch: order_of(len(rows), epoch))
    return RowQueue(rollouts, order, row_of, options, training, processes)
