"""Groups that stand in line for the steps of a training, and run while it trains.

    line = GroupLine(rollouts, group_size=8, trained=model)
    line.hand_over(weights, step)
    drawn = line.draw(rule, options, began, row_at=..., judge=...)    # what this step takes
    line.renumber(used)                                               # the rows that are gone
    line.stop()

A step looks at the line, has every group judged that has ended, and asks its rule what follows: begin
more, take some, or wait. What it does not take goes on, with its engine requests, tools and
environments.

Invariants: a group is begun once, judged once and taken once; those that are dead are given back with
those that were taken, and all others stay in line, in their order; a rollout that fails raises its own
error at the next look; after `stop` nothing is left.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout.ahead import Begun, RolloutsAhead, tell
from toolgrpo.rollout.batch import RolloutTimes, Row
from toolgrpo.rollout.held_time import HoldingLoop
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import run_blocking
from toolgrpo.rollout.sources import Decided, Group, GroupDraw, Judge, Verdict

if TYPE_CHECKING:
    import torch


V = TypeVar("V", bound=Verdict)


class LineDecided(Decided, Protocol):
    """What follows, and how many of what stays in line the next step must wait for."""

    @property
    def owed(self) -> int: ...


class LineRule(Protocol):
    """Says what follows from the groups in line: each live, dead or open (None).

    `ended` are their numbers in the order in which they ended; the first `owed` were passed over.
    """

    def decide(self, live: Sequence[bool | None], *, ended: Sequence[int], owed: int) -> LineDecided: ...


@dataclass(frozen=True, slots=True)
class AsItIs:
    """The verdict where nobody judges."""

    live: bool = True


async def as_it_is(row: Row, trajectories: tuple[Any, ...]) -> AsItIs:
    """Take a group whatever it is worth."""
    return AsItIs()


@dataclass(frozen=True, slots=True)
class LineDraw(Generic[V]):
    """What a step took, and the dead: `places` of its groups among the planned rows, and for each
    that is admitted how many steps old the weights are that it began with. `carried` of them were
    passed over by the step before.
    """

    draw: GroupDraw[V]
    places: tuple[int, ...]
    staleness: tuple[int, ...]
    carried: int


@dataclass(slots=True, eq=False)
class _Standing(Generic[V]):
    """A group in line."""

    place: int  # of its row, among the planned ones
    row: Row
    begun: Begun
    group: Group[V] | None = None  # once it was judged

    @property
    def live(self) -> bool | None:
        return None if self.group is None else self.group.verdict.live


class GroupLine(Generic[V]):
    """The groups of one process, from the first `draw` until `stop`."""

    def __init__(self, rollouts: Rollouts, *, group_size: int, trained: torch.nn.Module) -> None:
        self._rollouts = rollouts
        self._group_size = group_size
        self._ahead = RolloutsAhead(rollouts, trained=trained)
        self._line: list[_Standing[V]] = []
        self._ended: list[_Standing[V]] = []  # those that were judged, in the order in which they ended
        self._news: queue.SimpleQueue[_Standing[V]] = queue.SimpleQueue()
        self._owed = 0

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the groups in line among the planned rows."""
        return tuple(one.place for one in self._line)

    def draw(
        self,
        rule: LineRule,
        options: SamplingOptions,
        began: RolloutBegan,
        *,
        rows: Iterable[tuple[int, Row]],
        judge: Judge[V],
    ) -> LineDraw[V]:
        """Return what this step takes; `rows` are those to be begun next, with their places."""
        coming = iter(rows)
        self._ahead.caller_waits()
        with self._rollouts.telling(began):
            while (decision := self._decision(rule)).admitted is None:
                for _ in range(decision.draw):
                    self._begin(*next(coming), options, began.step)
                if not decision.draw:
                    self._judge(self._next_ended(), judge)
            drawn = self._taken(decision, began.step)
            groups = drawn.draw.groups
            tell(
                self._rollouts.observers,
                began,
                [group.row for group in groups for _ in group.trajectories],
                [trajectory for group in groups for trajectory in group.trajectories],
            )
        self._ahead.caller_goes_on()
        return drawn

    def renumber(self, used: Collection[int]) -> None:
        """Say which of the planned rows are gone, in any process: the others move up."""
        gone = sorted(used)
        for one in self._line:
            one.place -= sum(place < one.place for place in gone)

    def hand_over(self, weights: Iterable[tuple[str, torch.Tensor]], step: int) -> None:
        """Go on with these weights, of a step."""
        self._ahead.hand_over(weights, step)

    def settle(self) -> None:
        """Wait until every group has ended, so that the engine is free; all stay in line."""
        self._ahead.settle()

    def stop(self) -> None:
        """Cancel what is in line."""
        self._ahead.stop()
        self._line, self._ended, self._owed = [], [], 0
        self._news = queue.SimpleQueue()

    def _begin(self, place: int, row: Row, options: SamplingOptions, step: int) -> None:
        begun = self._ahead.begin([row] * self._group_size, options, step=step, group_size=self._group_size)
        standing: _Standing[V] = _Standing(place, row, begun)
        self._line.append(standing)
        news = self._news
        begun.result.add_done_callback(lambda _: news.put(standing))

    def _decision(self, rule: LineRule) -> LineDecided:
        number_of = {one: number for number, one in enumerate(self._line)}
        return rule.decide(
            [one.live for one in self._line], ended=[number_of[one] for one in self._ended], owed=self._owed
        )

    def _next_ended(self) -> list[_Standing[V]]:
        """Wait for a group to end, and return it with those that have ended since the last look."""
        ended = [self._news.get()]
        while not self._news.empty():
            ended.append(self._news.get())
        return ended

    def _judge(self, ended: Sequence[_Standing[V]], judge: Judge[V]) -> None:
        trajectories = [one.begun.result.result().trajectories for one in ended]  # or its own error

        async def verdicts() -> list[V]:
            asked = (judge(one.row, of) for one, of in zip(ended, trajectories, strict=True))
            return list(await asyncio.gather(*asked))

        judged = run_blocking(verdicts, loop_factory=HoldingLoop)
        for one, of, verdict in zip(ended, trajectories, judged, strict=True):
            one.group = Group(one.row, of, verdict)
            self._ended.append(one)

    def _taken(self, decision: LineDecided, step: int) -> LineDraw[V]:
        assert decision.admitted is not None
        admitted = {self._line[number] for number in decision.admitted}
        carried = sum(number < self._owed for number in decision.admitted)
        taken = [one for one in self._line if one in admitted or one.live is False]
        self._line = [one for one in self._line if one not in taken]
        self._ended = [one for one in self._ended if one not in taken]
        self._owed = decision.owed
        for one in taken:
            self._ahead.forget(one.begun)
        return LineDraw(
            GroupDraw(
                groups=tuple(one.group for one in taken if one.group is not None),
                admitted=tuple(number for number, one in enumerate(taken) if one in admitted),
                times=_times([one.begun.result.result().times for one in taken]),
            ),
            places=tuple(one.place for one in taken),
            staleness=tuple(step - one.begun.step for one in taken if one in admitted),
            carried=carried,
        )


def _times(of: Sequence[RolloutTimes]) -> RolloutTimes:
    """Return the times of groups that ran beside each other: from the first beginning to the last
    end, of which the engine had nothing to do for so large a share as in the one that ran longest.
    """
    started_s = min(one.started_s for one in of)
    duration_s = max(one.started_s + one.duration_s for one in of) - started_s
    longest = max(of, key=lambda one: one.duration_s)
    idle = longest.engine_idle_s / longest.duration_s if longest.duration_s else 0.0
    return RolloutTimes(duration_s, idle * duration_s, started_s)
