"""Groups of episodes that stand in line for the steps of a training.

    line = GroupLine(rollouts)                                      # a step's groups run while it waits
    line = GroupLine(rollouts, ahead=RolloutsAhead(...))            # and others while it trains
    drawn = line.draw(rule, options, began, pieces=..., judge=...)  # what this step takes
    line.renumber(used)                                             # the rows that are gone
    line.stop()

A step looks at the line, has every group judged that has ended, and asks its rule what follows: begin
more, take some, or wait. What it does not take goes on, with its engine requests, tools and
environments; without `ahead` the rule leaves nothing.

What stands in line is a piece: the episodes of one row, or those of several rows that are taken as one.

Invariants: a piece is begun once, judged once and taken once; those that are dead are given back with
those that were taken, and all others stay in line, in their order; a rollout that fails raises its own
error; whatever ends a draw without `ahead` early cancels what runs, and after `stop` nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout.admission import Admission, Decision
from toolgrpo.rollout.ahead import Begun, RolloutsAhead, tell
from toolgrpo.rollout.batch import RolloutTimes, Row
from toolgrpo.rollout.held_time import HoldingLoop
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import check_complete, run_blocking
from toolgrpo.trajectory import Trajectory


class Verdict(Protocol):
    """Verdict of a judge on a piece."""

    @property
    def live(self) -> bool: ...


V = TypeVar("V", bound=Verdict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Episodes that are begun and taken together: a row for each, and the places of their rows among the planned ones."""

    places: tuple[int, ...]
    rows: tuple[Row, ...]


Judge = Callable[[Piece, tuple[Trajectory, ...]], Awaitable[V]]


@dataclass(frozen=True, slots=True)
class AsItIs:
    """The verdict where nobody judges."""

    live: bool = True


async def as_it_is(piece: Piece, trajectories: tuple[Trajectory, ...]) -> AsItIs:
    """Take a piece whatever it is worth."""
    return AsItIs()


@dataclass(frozen=True, slots=True)
class Drawn(Generic[V]):
    """A piece that was taken or is dead."""

    piece: Piece
    trajectories: tuple[Trajectory, ...]
    verdict: V


@dataclass(frozen=True, slots=True)
class LineDraw(Generic[V]):
    """Pieces that a step took, and the dead; of each that is `admitted`, how many steps old the weights are
    that it began with. `carried` of them were passed over by the step before.
    """

    drawn: tuple[Drawn[V], ...]
    admitted: tuple[int, ...]
    step: int
    times: RolloutTimes
    staleness: tuple[int, ...]
    carried: int

    @property
    def places(self) -> tuple[int, ...]:
        """The places of their rows among the planned ones."""
        return tuple(place for one in self.drawn for place in one.piece.places)


@dataclass(slots=True, eq=False)
class _Standing(Generic[V]):
    """A piece in line."""

    piece: Piece
    step: int  # of the weights that it began with
    ended: Callable[[], Awaitable[tuple[Trajectory, ...]]]  # waits for its episodes
    begun: Begun | None = None  # where it runs ahead
    trajectories: tuple[Trajectory, ...] | None = None
    verdict: V | None = None

    @property
    def live(self) -> bool | None:
        return None if self.verdict is None else self.verdict.live


class GroupLine(Generic[V]):
    """The pieces of one process."""

    def __init__(self, rollouts: Rollouts, *, ahead: RolloutsAhead | None = None) -> None:
        self.ahead = ahead
        self._rollouts = rollouts
        self._line: list[_Standing[V]] = []
        self._ended: list[_Standing[V]] = []  # those that were judged, in the order in which they ended
        self._owed = 0

    def __len__(self) -> int:
        return len(self._line)

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the rows in line among the planned ones."""
        return tuple(place for one in self._line for place in one.piece.places)

    def draw(
        self,
        rule: Admission,
        options: SamplingOptions,
        began: RolloutBegan,
        *,
        pieces: Iterable[Piece],
        judge: Judge[V],
    ) -> LineDraw[V]:
        """Return what this step takes; `pieces` are those to be begun next."""
        with self._rollouts.telling(began):
            drawn = run_blocking(
                lambda: self._draw(rule, options, began, iter(pieces), judge), loop_factory=HoldingLoop
            )
            if self.ahead is not None:  # while they ran nobody could say of which step they would be
                rows = [row for one in drawn.drawn for row in one.piece.rows]
                tell(self._rollouts.observers, began, rows, [t for one in drawn.drawn for t in one.trajectories])
        return drawn

    def renumber(self, used: Collection[int]) -> None:
        """Say which of the planned rows are gone, in any process: the others move up."""
        gone = sorted(used)
        for one in self._line:
            places = tuple(place - sum(other < place for other in gone) for place in one.piece.places)
            one.piece = Piece(places, one.piece.rows)

    def settle(self) -> None:
        """Wait until every piece has ended, so that the engine is free; all stay in line."""
        if self.ahead is not None:
            self.ahead.settle()

    def stop(self) -> None:
        """Cancel what is in line."""
        if self.ahead is not None:
            self.ahead.stop()
        self._line, self._ended, self._owed = [], [], 0

    async def _draw(
        self, rule: Admission, options: SamplingOptions, began: RolloutBegan, pieces: Iterator[Piece], judge: Judge[V]
    ) -> LineDraw[V]:
        open_ones: dict[asyncio.Task[None], _Standing[V]] = {}

        def watch(one: _Standing[V]) -> None:
            open_ones[asyncio.create_task(self._settle(one, judge))] = one

        async with self._running(options, began) as (begin, times):
            try:
                for one in self._line:
                    if one.verdict is None:
                        watch(one)
                while (decision := self._decision(rule)).admitted is None:
                    for _ in range(decision.draw):
                        self._line.append(begin(next(pieces)))
                        watch(self._line[-1])
                    if not decision.draw:
                        done, _ = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            del open_ones[task]
                            task.result()  # or its own error
            except BaseException:
                if self.ahead is None:
                    self._line, self._ended = [], []
                raise
            finally:
                await _let_go(task for task, one in open_ones.items() if self.ahead is None or one.trajectories is None)
                await asyncio.gather(*open_ones, return_exceptions=True)  # those that are being judged
            return self._taken(decision, began.step, times)

    async def _settle(self, one: _Standing[V], judge: Judge[V]) -> None:
        one.trajectories = await one.ended()
        one.verdict = await judge(one.piece, one.trajectories)
        self._ended.append(one)

    def _decision(self, rule: Admission) -> Decision:
        number_of = {one: number for number, one in enumerate(self._line)}
        return rule.decide(
            [one.live for one in self._line], ended=[number_of[one] for one in self._ended], owed=self._owed
        )

    @asynccontextmanager
    async def _running(self, options: SamplingOptions, began: RolloutBegan) -> Any:
        """Give what begins a piece, and what tells the times of those that were taken."""
        if (ahead := self.ahead) is not None:

            def begin_ahead(piece: Piece) -> _Standing[V]:
                begun = ahead.begin(piece.rows, options, step=began.step)
                return _Standing(piece, began.step, lambda: _trajectories_of(begun), begun)

            yield begin_ahead, lambda taken: _together([one.begun.result().times for one in taken])
            return
        scheduler = self._rollouts.scheduler(options, began)
        n_begun = 0

        def begin(piece: Piece) -> _Standing[V]:
            nonlocal n_begun
            episodes = [self._rollouts.episode(row, number) for number, row in enumerate(piece.rows, start=n_begun)]
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

            return _Standing(piece, began.step, ended)

        async with scheduler:
            yield begin, lambda taken: scheduler.times

    def _taken(
        self, decision: Decision, step: int, times: Callable[[Sequence[_Standing[V]]], RolloutTimes]
    ) -> LineDraw[V]:
        assert decision.admitted is not None
        admitted = {self._line[number] for number in decision.admitted}
        carried = sum(number < self._owed for number in decision.admitted)
        taken = [one for one in self._line if one in admitted or one.live is False]
        self._line = [one for one in self._line if one not in taken]
        self._ended = [one for one in self._ended if one not in taken]
        self._owed = decision.owed
        for one in taken:
            if one.begun is not None and self.ahead is not None:
                self.ahead.forget(one.begun)
        return LineDraw(
            drawn=tuple(
                Drawn(one.piece, one.trajectories or (), one.verdict) for one in taken if one.verdict is not None
            ),
            admitted=tuple(number for number, one in enumerate(taken) if one in admitted),
            step=step,
            times=times(taken),
            staleness=tuple(step - one.step for one in taken if one in admitted),
            carried=carried,
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


async def _let_go(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel what waits, and see it end."""
    cancelled = [task for task in tasks if not task.done() and task.cancel()]
    await asyncio.gather(*cancelled, return_exceptions=True)


def _together(of: Sequence[RolloutTimes]) -> RolloutTimes:
    """Return the times of groups that ran beside each other: from the first beginning to the last
    end, of which the engine had nothing to do for so large a share as in the one that ran longest.
    """
    started_s = min(one.started_s for one in of)
    duration_s = max(one.started_s + one.duration_s for one in of) - started_s
    longest = max(of, key=lambda one: one.duration_s)
    idle = longest.engine_idle_s / longest.duration_s if longest.duration_s else 0.0
    return RolloutTimes(duration_s, idle * duration_s, started_s)
