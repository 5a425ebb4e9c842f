"""Groups in flight: what was begun and no step has taken yet. `StepGroups` (`trainer/batches.py`) takes of them for each step.

    queue = GroupQueue(rollouts)                                      # a step's groups run while it waits
    queue = GroupQueue(rollouts, ahead=RolloutsAhead(...))           # and others while it trains
    taken = queue.take(rule, options, began, sets=..., judge=...)    # what this step takes
    queue.renumber(used)                                             # the rows that are gone
    queue.stop()

A step looks at the queue, has every group judged that has ended, and asks its rule what follows: begin
more, take some, or wait. What it does not take goes on, with its engine requests, tools and
environments; without `ahead` the rule leaves nothing.

A set is what waits there: the episodes of one row, or those of several rows that are taken as one.

The rule (`Admission`) is a pure decision over what is known so far. A step wants `target` live groups.

Invariants of the rule: groups are admitted in the order of submission, never of completion, so that short
episodes have no advantage, and the decision depends on what they are worth and not on when they ended; no more
than `most` groups are drawn for a step; exactly `target` groups are admitted, at the bound with the earliest
dead ones among them.

Invariants of the queue: a set is begun once, judged once and taken once; those that are dead are given back with
those that were taken, and all others stay in the queue, in their order; a rollout that fails raises its own
error; whatever ends a draw without `ahead` early cancels what runs, and after `stop` nothing is left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.rollout.ahead import Begun, RolloutsAhead, tell
from toolgrpo.rollout.batch import RolloutTimes, Row
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import check_complete, run_blocking


@dataclass(frozen=True, slots=True)
class Decision:
    """Begin so many more groups; or, once the step is decided, train on those of these numbers.

    With neither there is nothing to do but to wait.
    """

    begin: int = 0
    admitted: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """Number of live groups that a step wants, and of groups it may draw; `beyond` groups wait for later steps."""

    target: int
    most: int
    beyond: int = 0

    @classmethod
    def of(cls, target: int, *, max_groups_drawn: float, beyond: int = 0) -> Admission:
        """Return the rule for a number of groups, with the most as a factor of it."""
        return cls(target, max(target, math.floor(target * max_groups_drawn)), beyond)

    def decide(self, live: Sequence[bool | None]) -> Decision:
        """Say what follows from the groups so far, in the order of submission: live, dead, or still open (None)."""
        missing = self.target + self.beyond - live.count(None) - live.count(True)
        room = self.most + self.beyond - len(live)
        if missing > 0 and room > 0:
            return Decision(begin=min(missing, room))
        head = live[: self.most]
        first = [number for number, alive in enumerate(head) if alive is not False][: self.target]
        if any(live[number] is None for number in first):
            return Decision()
        dead = [number for number, alive in enumerate(head) if alive is False]
        return Decision(admitted=tuple(sorted([*first, *dead[: self.target - len(first)]])))


class GroupVerdict(Protocol):
    """Verdict of a judge on a group_set."""

    @property
    def live(self) -> bool: ...


V = TypeVar("V", bound=GroupVerdict)


@dataclass(frozen=True, slots=True)
class GroupSet:
    """Episodes that are begun and taken together: a row for each, and the places of their rows among the planned ones."""

    places: tuple[int, ...]
    rows: tuple[Row, ...]


Judge = Callable[[GroupSet, tuple[Trajectory, ...]], Awaitable[V]]


@dataclass(frozen=True, slots=True)
class Unjudged:
    """The verdict where nobody judges."""

    live: bool = True


async def unjudged(group_set: GroupSet, trajectories: tuple[Trajectory, ...]) -> Unjudged:
    """Take a set whatever its rewards will be."""
    return Unjudged()


@dataclass(frozen=True, slots=True)
class TakenSet(Generic[V]):
    """A set that was taken or is dead."""

    group_set: GroupSet
    trajectories: tuple[Trajectory, ...]
    verdict: V


@dataclass(frozen=True, slots=True)
class TakenGroups(Generic[V]):
    """Sets that a step took, and the dead; of each that is `admitted`, how many steps old the weights are that it
    began with.
    """

    sets: tuple[TakenSet[V], ...]
    admitted: tuple[int, ...]
    step: int
    times: RolloutTimes
    staleness: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _InFlight(Generic[V]):
    """A set in the queue."""

    group_set: GroupSet
    step: int  # of the weights that it began with
    ended: Callable[[], Awaitable[tuple[Trajectory, ...]]]  # waits for its episodes
    begun: Begun | None = None  # where it runs ahead
    trajectories: tuple[Trajectory, ...] | None = None
    verdict: V | None = None

    @property
    def live(self) -> bool | None:
        return None if self.verdict is None else self.verdict.live


class GroupQueue(Generic[V]):
    """The sets of one process."""

    def __init__(self, rollouts: Rollouts, *, ahead: RolloutsAhead | None = None) -> None:
        self.ahead = ahead
        self._rollouts = rollouts
        self._queue: list[_InFlight[V]] = []

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the rows in the queue among the planned ones."""
        return tuple(place for one in self._queue for place in one.group_set.places)

    def take(
        self,
        rule: Admission,
        options: SamplingOptions,
        began: RolloutBegan,
        *,
        sets: Iterable[GroupSet],
        judge: Judge[V],
    ) -> TakenGroups[V]:
        """Return what this step takes; `sets` are those to be begun next."""
        with self._rollouts.telling(began):
            taken = run_blocking(self._take(rule, options, began, iter(sets), judge))
            # Ahead, nobody could say while they ran of which step they would be, so observers hear of them only now.
            if self.ahead is not None:
                rows = [row for one in taken.sets for row in one.group_set.rows]
                tell(self._rollouts.observers, began, rows, [t for one in taken.sets for t in one.trajectories])
        return taken

    def renumber(self, used: Collection[int]) -> None:
        """Say which of the planned rows are gone, in any process: the others move up.

        The next plan begins with the first row that is not gone, so a place is counted without those before it.
        """
        gone = sorted(used)
        for one in self._queue:
            places = tuple(place - sum(other < place for other in gone) for place in one.group_set.places)
            one.group_set = GroupSet(places, one.group_set.rows)

    def settle(self) -> None:
        """Wait until every set has ended, so that the engine is free; all stay in the queue."""
        if self.ahead is not None:
            self.ahead.settle()

    def stop(self) -> None:
        """Cancel what is in the queue."""
        if self.ahead is not None:
            self.ahead.stop()
        self._queue = []

    async def _take(
        self,
        rule: Admission,
        options: SamplingOptions,
        began: RolloutBegan,
        sets: Iterator[GroupSet],
        judge: Judge[V],
    ) -> TakenGroups[V]:
        open_ones: dict[asyncio.Task[None], _InFlight[V]] = {}
        failed: dict[_InFlight[V], asyncio.Task[None]] = {}

        def watch(one: _InFlight[V]) -> None:
            open_ones[asyncio.create_task(self._settle(one, judge))] = one

        async with self._running(options, began) as (begin, times):
            try:
                for one in self._queue:
                    if one.verdict is None:
                        watch(one)
                while (decision := rule.decide([one.live for one in self._queue])).admitted is None:
                    for _ in range(decision.begin):
                        self._queue.append(begin(next(sets)))
                        watch(self._queue[-1])
                    if not decision.begin:
                        oldest = next((one for one in self._queue if one.verdict is None), None)
                        # Ahead, a failure is raised when all before it have been taken, so that it ends the same step of
                        # every run, whenever it happened.
                        for one in failed:
                            if self.ahead is None or one is oldest:
                                failed[one].result()
                        done, _ = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                        failed |= {open_ones[task]: task for task in done if task.exception() is not None}
                        for task in done:
                            del open_ones[task]
            except BaseException:
                if self.ahead is None:  # their scheduler is about to cancel them
                    self._queue = []
                raise
            finally:
                # Ahead, a set goes on in its own thread when nobody waits for it here. Its judge is a task of this loop, and
                # comes to its end here: cancelled, it would have to ask the rewards again.
                for task, one in open_ones.items():
                    if self.ahead is None or one.trajectories is None:
                        task.cancel()
                await asyncio.gather(*open_ones, return_exceptions=True)
            return self._taken(decision, began.step, times)

    async def _settle(self, one: _InFlight[V], judge: Judge[V]) -> None:
        one.trajectories = await one.ended()
        one.verdict = await judge(one.group_set, one.trajectories)

    @asynccontextmanager
    async def _running(self, options: SamplingOptions, began: RolloutBegan) -> Any:
        """Give what begins a set, and what tells the times of those that were taken."""
        if (ahead := self.ahead) is not None:

            def begin_ahead(group_set: GroupSet) -> _InFlight[V]:
                begun = ahead.begin(group_set.rows, options, step=began.step)
                return _InFlight(group_set, began.step, lambda: _trajectories_of(begun), begun)

            yield begin_ahead, lambda taken: _together([one.begun.result().times for one in taken])
            return
        scheduler = self._rollouts.scheduler(options, began)
        n_begun = 0

        def begin(group_set: GroupSet) -> _InFlight[V]:
            nonlocal n_begun
            episodes = [self._rollouts.episode(row, number) for number, row in enumerate(group_set.rows, start=n_begun)]
            n_begun += len(episodes)
            handles = [scheduler.submit(episode) for episode in episodes]

            async def ended() -> tuple[Trajectory, ...]:
                try:
                    trajectories = tuple(await asyncio.gather(*handles))
                finally:
                    for handle in handles:
                        handle.cancel()
                check_complete(trajectories)
                return trajectories

            return _InFlight(group_set, began.step, ended)

        async with scheduler:
            yield begin, lambda taken: scheduler.times

    def _taken(
        self, decision: Decision, step: int, times: Callable[[Sequence[_InFlight[V]]], RolloutTimes]
    ) -> TakenGroups[V]:
        assert decision.admitted is not None
        admitted = {self._queue[number] for number in decision.admitted}
        taken = [one for one in self._queue if one in admitted or one.live is False]
        self._queue = [one for one in self._queue if one not in taken]
        for one in taken:
            if one.begun is not None and self.ahead is not None:
                self.ahead.forget(one.begun)
        return TakenGroups(
            sets=tuple(
                TakenSet(one.group_set, one.trajectories or (), one.verdict) for one in taken if one.verdict is not None
            ),
            admitted=tuple(number for number, one in enumerate(taken) if one in admitted),
            step=step,
            times=times(taken),
            staleness=tuple(step - one.step for one in taken if one in admitted),
        )


async def _trajectories_of(begun: Begun) -> tuple[Trajectory, ...]:
    """Wait for a rollout of another thread, which goes on where this wait is cancelled."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell_loop(_: Begun) -> None:
        with suppress(RuntimeError):  # the draw is over, and its loop is closed
            loop.call_soon_threadsafe(ended.set)

    begun.add_done_callback(tell_loop)
    await ended.wait()
    return tuple(begun.result().trajectories)


def _together(of: Sequence[RolloutTimes]) -> RolloutTimes:
    """Return the times of groups that ran beside each other: from the first beginning to the last
    end, of which the engine had nothing to do for so large a share as in the one that ran longest.
    """
    started_s = min(one.started_s for one in of)
    duration_s = max(one.started_s + one.duration_s for one in of) - started_s
    longest = max(of, key=lambda one: one.duration_s)
    idle = longest.engine_idle_s / longest.duration_s if longest.duration_s else 0.0
    return RolloutTimes(duration_s, idle * duration_s, started_s)
