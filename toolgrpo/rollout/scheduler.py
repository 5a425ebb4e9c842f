"""Run many episodes at once on one event loop, with no barrier between them.

Invariants: exactly one trajectory for each episode, in input order; at most `max_concurrent` episodes are open at a time;
the engine is open exactly while episodes run; whatever ends the rollout early (a plugin error, Ctrl-C) cancels every
open episode before it is raised, so no request, tool call or task is left behind.

If an episode is lost to a failure of the world, its siblings still end; then `EngineError` says how many were lost and
why. A lost episode never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from toolgrpo.engines.base import Engine, Sample, SampleRequest
from toolgrpo.errors import EngineError
from toolgrpo.rollout.episode import Episode, EpisodeRunner
from toolgrpo.trajectory import StopReason, Trajectory

__all__ = ["RolloutResult", "run_episodes", "run_rollout"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What came out of one rollout, and where its time went."""

    trajectories: tuple[Trajectory, ...]
    duration_s: float
    engine_idle_s: float  # time in which no episode was waiting for the engine


class _BusyMeter:
    """Wraps an engine's `sample` to measure the time in which at least one request is open."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._open = 0
        self._since = 0.0
        self.busy_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(self, request: SampleRequest) -> Sample:
        if self._open == 0:
            self._since = self._clock()
        self._open += 1
        try:
            return await self._engine.sample(request)
        finally:
            self._open -= 1
            if self._open == 0:
                self.busy_s += self._clock() - self._since


async def run_episodes(
    episodes: Sequence[Episode],
    runner: EpisodeRunner,
    *,
    max_concurrent: int | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
) -> RolloutResult:
    """Run all episodes; see the module's invariants."""
    clock = runner.clock
    started = clock()
    meter = _BusyMeter(runner.engine, clock)
    metered = replace(runner, engine=meter)
    gate = asyncio.Semaphore(max_concurrent or max(1, len(episodes)))

    async def one(episode: Episode) -> Trajectory:
        async with gate:
            trajectory = await metered(episode)
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    await runner.engine.open()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(episode)) for episode in episodes]
    except BaseExceptionGroup as errors:
        # Siblings only end with cancellation, so the first one is what went wrong; it keeps its own type and traceback.
        raise errors.exceptions[0] from None
    finally:
        await runner.engine.close()
    trajectories = tuple(task.result() for task in tasks)
    _check_complete(trajectories)
    duration = clock() - started
    return RolloutResult(trajectories, duration, max(0.0, duration - meter.busy_s))


def _check_complete(trajectories: Sequence[Trajectory]) -> None:
    lost = [t for t in trajectories if t.stop_reason is StopReason.ENGINE_FAILURE]
    if lost:
        raise EngineError(
            f"{len(lost)} of {len(trajectories)} episodes could not be completed, after retries; the first failed with: "
            f"{lost[0].failure}. Nothing was trained on this batch. Mend the cause and resume from the last checkpoint."
        )


def run_rollout(
    episodes: Sequence[Episode],
    runner: EpisodeRunner,
    *,
    max_concurrent: int | None = None,
    on_done: Callable[[Trajectory], None] | None = None,
) -> RolloutResult:
    """`run_episodes` for a caller that is not async, also where an event loop already runs (a notebook)."""

    def run() -> RolloutResult:
        # The main task returns nothing: asyncio.run makes a repr of it when it ends (through signal.getsignal), and the
        # repr of a whole rollout takes longer than scheduling it.
        outcome: list[RolloutResult] = []

        async def main() -> None:
            outcome.append(await run_episodes(episodes, runner, max_concurrent=max_concurrent, on_done=on_done))

        asyncio.run(main())
        return outcome[0]

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    return _in_thread(run)


def _in_thread(function: Callable[[], T]) -> T:
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # carried over to the calling thread, which raises it
            failure.append(error)

    thread = threading.Thread(target=target, name="toolgrpo-rollout")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
