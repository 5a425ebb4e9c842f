"""Episodes that are drawn as the rollout goes: a loop around one scheduler, with no second round.

`draw_groups` submits groups, has each judged as soon as its episodes have ended, and asks what
follows: more groups, or the end. What groups are, what they are worth and when there are enough of
them is the caller's.

Invariants: episodes of a group are submitted together, groups in the order of their numbers; it is
decided when every group that was begun has ended; whatever ends it early cancels those that run,
with their tools, environments and judges, and leaves nothing behind, as `Scheduler` has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout.batch import RolloutTimes, Row
from toolgrpo.rollout.held_time import HoldingLoop
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import Handle, Scheduler, check_complete, run_blocking
from toolgrpo.trajectory import Trajectory


class Verdict(Protocol):
    """What a judge says of a group."""

    @property
    def live(self) -> bool: ...


class Decided(Protocol):
    """What follows from the groups so far: draw more; the end, with those admitted; or wait."""

    @property
    def draw(self) -> int: ...

    @property
    def admitted(self) -> tuple[int, ...] | None: ...


V = TypeVar("V", bound=Verdict)
Judge = Callable[[Row, tuple[Trajectory, ...]], Awaitable[V]]
Decide = Callable[[Sequence[bool | None]], Decided]


@dataclass(frozen=True, slots=True)
class Group(Generic[V]):
    """The episodes of one row, and what they were worth."""

    row: Row
    trajectories: tuple[Trajectory, ...]
    verdict: V


@dataclass(frozen=True, slots=True)
class GroupDraw(Generic[V]):
    """All groups, by their numbers, and which are admitted."""

    groups: tuple[Group[V], ...]
    admitted: tuple[int, ...]
    times: RolloutTimes


@dataclass(frozen=True, slots=True)
class _Begun(Generic[V]):
    """A group whose episodes were submitted; `settled` waits for them and has them judged."""

    handles: tuple[Handle, ...]
    settled: asyncio.Task[Group[V]]

    def live(self) -> bool | None:
        """Return whether the group is live, or raise what went wrong in it."""
        return self.settled.result().verdict.live if self.settled.done() else None

    def cancel(self) -> None:
        self.settled.cancel()
        for handle in self.handles:
            handle.cancel()


@dataclass(frozen=True, slots=True)
class GroupSource(Generic[V]):
    """What one draw runs on. `decide` is told, group by group in the order of submission, whether it
    is live (None: open); `row_of` gives the row of a group by its number.
    """

    rollouts: Rollouts
    scheduler: Scheduler
    row_of: Callable[[int], Row]
    group_size: int
    judge: Judge[V]
    decide: Decide

    async def run(self) -> GroupDraw[V]:
        """Open the scheduler, draw until it is decided, and close it."""
        groups: list[_Begun[V]] = []
        async with self.scheduler:
            try:
                while (decision := self.decide([group.live() for group in groups])).admitted is None:
                    for _ in range(decision.draw):
                        groups.append(self._begin(len(groups)))
                    if not decision.draw:
                        still_open = [group.settled for group in groups if not group.settled.done()]
                        await asyncio.wait(still_open, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancel(groups)
        return GroupDraw(
            groups=tuple(group.settled.result() for group in groups),
            admitted=decision.admitted,
            times=self.scheduler.times,
        )

    def _begin(self, number: int) -> _Begun[V]:
        row, first = self.row_of(number), number * self.group_size
        episodes = [self.rollouts.episode(row, first + member) for member in range(self.group_size)]
        handles = tuple(self.scheduler.submit(episode) for episode in episodes)

        async def settle() -> Group[V]:
            trajectories = tuple(await asyncio.gather(*handles))
            check_complete(trajectories)
            return Group(row, trajectories, await self.judge(row, trajectories))

        return _Begun(handles, asyncio.create_task(settle()))


def draw_groups(
    rollouts: Rollouts,
    options: SamplingOptions,
    began: RolloutBegan,
    *,
    row_of: Callable[[int], Row],
    group_size: int,
    judge: Judge[V],
    decide: Decide,
) -> GroupDraw[V]:
    """Run groups of episodes until `decide` says which to take; the observers hear of it."""
    with rollouts.telling(began):
        return run_blocking(
            lambda: GroupSource(rollouts, rollouts.scheduler(options, began), row_of, group_size, judge, decide).run(),
            loop_factory=HoldingLoop,
        )


async def _cancel(groups: Sequence[_Begun[Any]]) -> None:
    """Cancel what is still open, and wait until it has let go of everything."""
    still_open = [group for group in groups if not group.settled.done()]
    for group in still_open:
        group.cancel()
    if still_open:
        await asyncio.wait([group.settled for group in still_open])
    for group in groups:
        if not group.settled.cancelled():
            group.settled.exception()  # looked at; the first one is raised by whoever met it
