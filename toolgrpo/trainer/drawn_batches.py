"""Batches whose groups are chosen here: drawn in their order, judged as they end, replaced if dead.

One call of `DrawnBatches.draw` is one generation batch of TRL:

    plan       the rows that this step may come to, the same in every process
    draw       each process runs whole groups of its own share and waits for no other
    agree      what was drawn, in all processes: the order of rows moves on
    deal out   every process gets the rows of its slice of the batch, as TRL's sampler deals them

Invariants: rewards are asked once per episode; the batch is what TRL would have had if its sampler
had drawn the admitted rows; nothing collective happens between plan and agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from accelerate.utils import gather_object

from toolgrpo.credit.options import Credit
from toolgrpo.credit.turns import episode_turns, teaches
from toolgrpo.drops import DropEpisode
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.errors import ConfigError
from toolgrpo.rollout.batch import RolloutBatch, Row, Scored, Success
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.sources import GroupDraw, draw_groups
from toolgrpo.signal.admission import Admission
from toolgrpo.signal.advantages import is_dead, weighted_sums
from toolgrpo.signal.dropped import grade_of
from toolgrpo.signal.row_order import RowOrder
from toolgrpo.signal.shaping import Shaping, members_of
from toolgrpo.trainer.groups_ahead import GroupsAhead
from toolgrpo.trajectory import Trajectory

# Which groups of a step belong to which process, where each of them draws whole groups.
#
# TRL gives every process equally many rows, in one piece, so a group may lie in two of them. Here a
# process runs whole groups of its own, and waits for no other; the rows go where TRL wants them
# afterwards.
#
# The groups of a step are numbered over all processes: first those it begins with, `n_groups` of
# them, then those that are drawn besides, which the processes take in turn.


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """The share of one process in the groups of a step."""

    n_groups: int
    n_processes: int = 1
    process: int = 0

    @property
    def own(self) -> range:
        """Return the numbers of the groups that this process begins with."""
        return self._of(self.process)

    def number(self, group: int) -> int:
        """Return the number, over all processes, of the group that this one submits as its n-th."""
        if group < len(self.own):
            return self.own[group]
        owners = [process for process in range(self.n_processes) if self._of(process)]
        return self.n_groups + (group - len(self.own)) * len(owners) + owners.index(self.process)

    @property
    def largest(self) -> int:
        """Return how many groups the process with the most of them begins with."""
        return max(len(self._of(process)) for process in range(self.n_processes))

    def n_planned(self, extra: int) -> int:
        """Return how many numbers there are if no process draws more than `extra` besides its own."""
        return self.n_groups + extra * sum(1 for process in range(self.n_processes) if self._of(process))

    def _of(self, process: int) -> range:
        def first(of: int) -> int:
            return -(-of * self.n_groups // self.n_processes)

        return range(first(process), first(process + 1))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the rewards said of some episodes: per episode a value of each function (NaN: None), and
    what they logged, columns per episode and numbers.
    """

    values: tuple[tuple[float, ...], ...]
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    drops: Mapping[int, DropEpisode] = field(default_factory=dict)  # by the place of the episode
    turn_rewards: tuple[tuple[float, ...], ...] = ()  # per episode one for each turn; empty: nobody gives any


Ask = Callable[[Sequence[Row], Sequence[Trajectory]], Awaitable[Asked]]


@dataclass(frozen=True, slots=True)
class RewardRule:
    """How the rewards of an episode become one number, and which episodes succeeded."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    succeeded: Success
    shaping: Shaping  # what is taken off before a group is judged
    credit: Credit = field(default_factory=Credit)


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a group was worth: what the rewards said, its graded episodes, and if it is live."""

    asked: Asked
    episodes: tuple[Scored, ...]
    live: bool


@dataclass(frozen=True, slots=True)
class _Fate:
    """What all processes hear of a group."""

    number: int
    row: int
    live: bool
    successes: tuple[bool, ...]
    totals: tuple[float, ...]  # of the episodes that were scored


@dataclass(frozen=True, slots=True)
class _OwnDraw:
    """What this process has drawn, and for each group its place among the planned rows."""

    groups: GroupDraw[_Worth]
    places: Sequence[int]
    planned: Sequence[int]

    def row(self, group: int) -> int:
        return self.planned[self.places[group]]


@dataclass(frozen=True, slots=True)
class _TrainedRow:
    """One episode that is trained on, wherever it ran: what TRL needs of it."""

    row: int
    trajectory: Trajectory
    values: tuple[float, ...]
    columns: Mapping[str, Any]  # what rewards logged of it
    turn_rewards: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A process's slice of a generation batch, and all that it ran for it."""

    rows: tuple[Row, ...]
    trajectories: tuple[Trajectory, ...]
    values: tuple[tuple[float, ...], ...]  # of each reward function; NaN: it does not score the row
    columns: Mapping[str, tuple[Any, ...]]
    logged: Mapping[str, tuple[float, ...]]  # numbers that rewards logged
    ran: RolloutBatch  # graded; with `trained` on the episodes that are trained on
    n_episodes: int  # of all processes
    reward: float  # the mean over everything drawn
    metrics: Mapping[str, float]
    turn_rewards: tuple[tuple[float, ...] | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DrawnBatches:
    """Draws the batches of one run.

    `row_of` gives a row of the training data.
    """

    admission: Callable[[int], Admission]  # of a step of so many groups
    order: RowOrder
    rule: RewardRule
    row_of: Callable[[int], Row]
    group_size: int
    n_processes: int = 1
    process: int = 0
    gather: Callable[[list[Any]], list[Any]] = gather_object  # the lists of all processes, in their order
    ahead: GroupsAhead | None = None  # runs groups while others are trained on; None: only while a step waits

    def draw(
        self,
        rollouts: Rollouts,
        sampling: SamplingOptions,
        ask: Ask,
        *,
        n_rows: int,
        step: int,
        first_number: int,
    ) -> DrawnBatch:
        """Return this process's `n_rows` rows of a batch; every process must ask for as many.

        `first_number` is that of the batch's first episode in the run.
        """
        # plan, and draw
        share = ProcessShare(n_rows * self.n_processes // self.group_size, self.n_processes, self.process)
        own = self._run(rollouts, sampling, ask, share, step)
        drawn = own.groups
        # agree
        of_processes = self._agree(own)
        fates = list(chain.from_iterable(of_processes))
        used = [fate.number for fate in fates]
        if self.ahead is None:
            self.order.used(used)
        else:
            self.ahead.agree(used)
        counts = [sum(len(fate.successes) for fate in of_process) for of_process in of_processes]
        batch = self._batch(drawn, step).numbered(first_number + sum(counts[: self.process]))
        # deal out
        trained = self._deal_out(self._trained(own, batch), n_rows)
        totals = list(chain.from_iterable(fate.totals for fate in fates))
        return DrawnBatch(
            rows=tuple(self.row_of(one.row) for one in trained),
            trajectories=tuple(one.trajectory for one in trained),
            values=tuple(one.values for one in trained),
            columns=_columns([one.columns for one in trained]),
            logged=_logged([group.verdict.asked for group in drawn.groups]),
            ran=batch,
            n_episodes=sum(counts),
            reward=sum(totals) / len(totals) if totals else float("nan"),
            metrics=_metrics(fates),
            turn_rewards=tuple(one.turn_rewards for one in trained),
        )

    def _run(self, rollouts: Rollouts, sampling: SamplingOptions, ask: Ask, share: ProcessShare, step: int) -> _OwnDraw:
        async def judge(row: Row, trajectories: tuple[Trajectory, ...]) -> _Worth:
            return self._worth(row, trajectories, await ask([row] * len(trajectories), trajectories))

        admission = self.admission(len(share.own))
        if self.ahead is not None:
            line = self.ahead.draw(admission, judge)
            return _OwnDraw(line.draw, line.places, self.ahead.planned)
        largest = self.admission(share.largest)
        planned = self.order.plan(share.n_planned(largest.most - share.largest))
        drawn = draw_groups(
            rollouts,
            sampling,
            RolloutBegan(admission.target * self.group_size, step, "train", "episodes"),
            row_of=lambda group: self.row_of(planned[share.number(group)]),
            group_size=self.group_size,
            judge=judge,
            decide=admission.decide,
        )
        return _OwnDraw(drawn, [share.number(group) for group in range(len(drawn.groups))], planned)

    def _worth(self, row: Row, trajectories: Sequence[Trajectory], asked: Asked) -> _Worth:
        rule = self.rule
        totals = weighted_sums(asked.values, rule.weights)
        rewards = [
            {name: None if value != value else value for name, value in zip(rule.names, values, strict=True)}
            for values in asked.values
        ]
        grades = [
            grade_of(trajectory, of, total or 0.0, asked.drops.get(place))
            for place, (trajectory, of, total) in enumerate(zip(trajectories, rewards, totals, strict=True))
        ]
        batch = RolloutBatch(episodes=tuple(Scored(row, one) for one in trajectories)).graded(grades, rule.succeeded)
        if asked.turn_rewards:
            batch = batch.with_turn_rewards(asked.turn_rewards)
        combined = rule.shaping.rewards(members_of(batch), len(trajectories))
        live = not is_dead(combined) or (rule.credit.by_turn and teaches(episode_turns(batch)))
        return _Worth(asked, batch.episodes, live)

    def _agree(self, own: _OwnDraw) -> list[tuple[_Fate, ...]]:
        """Tell all processes what each has drawn."""
        drawn = own.groups
        fates = tuple(
            _fate(own.places[group], own.row(group), worth.verdict, self.rule.weights)
            for group, worth in enumerate(drawn.groups)
        )
        of_processes: list[tuple[_Fate, ...]] = self.gather([fates])
        return of_processes

    def _batch(self, drawn: GroupDraw[_Worth], step: int) -> RolloutBatch:
        """Return everything that this process ran, graded."""
        episodes = [
            replace(one, trained=group in drawn.admitted)
            for group, worth in enumerate(drawn.groups)
            for one in worth.verdict.episodes
        ]
        return RolloutBatch(episodes=tuple(episodes), step=step, times=drawn.times, group_size=self.group_size)

    def _trained(self, own: _OwnDraw, batch: RolloutBatch) -> list[_TrainedRow]:
        return [
            _TrainedRow(
                row=own.row(group),
                trajectory=batch.episodes[group * self.group_size + member].trajectory,
                values=asked.values[member],
                columns={name: values[member] for name, values in asked.columns.items()},
                turn_rewards=asked.turn_rewards[member] if asked.turn_rewards else None,
            )
            for group in own.groups.admitted
            for asked in [own.groups.groups[group].verdict.asked]
            for member in range(self.group_size)
        ]

    def _deal_out(self, own: list[_TrainedRow], n_rows: int) -> list[_TrainedRow]:
        """Give every process its slice of the batch; they have it where no group lies in two slices."""
        if n_rows % self.group_size == 0:
            return own
        everything: list[_TrainedRow] = self.gather(own)
        return everything[self.process * n_rows : (self.process + 1) * n_rows]


def row_order(rows: Any, order_of: Callable[[int, int], Sequence[int]]) -> RowOrder:
    """Return the order of the rows of a data set.

    `order_of(n_rows, epoch)` is that of TRL's sampler.
    """
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"dynamic_sampling, max_staleness and carry_over draw rows by their numbers, but the training data is "
            f"{'missing' if rows is None else f'a {type(rows).__name__}, which has none and may end in the middle of a step'}; "
            f"load it whole (not as a stream), or leave these off"
        )
    return RowOrder(len(rows), partial(order_of, len(rows)))


def _fate(number: int, row: int, worth: _Worth, weights: Sequence[float]) -> _Fate:
    totals = weighted_sums(worth.asked.values, weights)
    return _Fate(
        number,
        row,
        worth.live,
        tuple(bool(one.success) for one in worth.episodes),
        tuple(total for total in totals if total is not None),
    )


def _metrics(fates: Sequence[_Fate]) -> dict[str, float]:
    dead = [fate.successes for fate in fates if not fate.live]
    return {
        "sampling/groups_drawn": float(len(fates)),
        "sampling/dead_all_failed": float(sum(not any(successes) for successes in dead)),
        "sampling/dead_all_solved": float(sum(all(successes) for successes in dead)),
        "sampling/live_rate": 1 - len(dead) / len(fates),
    }


def _columns(of_rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    names = dict.fromkeys(name for columns in of_rows for name in columns)
    return {name: tuple(columns.get(name) for columns in of_rows) for name in names}


def _logged(asked: Sequence[Asked]) -> dict[str, tuple[float, ...]]:
    names = Counter(name for one in asked for name in one.metrics)
    return {name: tuple(chain.from_iterable(one.metrics.get(name, ()) for one in asked)) for name in names}
