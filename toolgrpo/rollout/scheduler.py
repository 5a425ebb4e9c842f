"""Run many episodes at once on one event loop, with no barrier between them; `Rollouts` and `GroupQueue` do.

`EpisodeRunner` is what the episodes of one rollout share. `EpisodeRun` (`episode.py`) plays them, or a `Player`.

A `Scheduler` takes episodes while it runs, so its source can be a list (`run_all`) or a loop
that decides by what has ended what comes next (`group_queue.py`):

    async with Scheduler(runner, max_concurrent=64) as scheduler:
        handles = [scheduler.submit(episode) for episode in first]
        ...  # await some of them, scheduler.submit(another), or cancel() one that nobody needs any more

Invariants: episodes start in the order in which they were submitted, at most `max_concurrent` of
them are open at a time, and each yields exactly one trajectory, or none if its handle was
cancelled; the engine is open exactly while the scheduler is; whatever ends it early (a plugin
error, Ctrl-C) cancels every open episode before it is raised, so no request, tool call or task is
left behind.

If an episode is lost to an infrastructure failure, its siblings still end; then `check_complete` says
how many were lost and why. A lost episode never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.checks import check_sample
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn
from toolgrpo.errors import EngineError, FinalEngineError
from toolgrpo.rollout.batch import RolloutBatch, RolloutTimes, Scored
from toolgrpo.rollout.episode import EpisodeRun
from toolgrpo.support.process_setup import on_this_device

if TYPE_CHECKING:
    from toolgrpo.rollout.rollouts import Rollouts

_RETRY_PAUSE_S = 0.5
T = TypeVar("T")
Handle = asyncio.Task[Trajectory]
"""An episode that was submitted: `cancel()` withdraws it,
`result()` is its trajectory once it has ended.
"""


@dataclass(frozen=True, slots=True)
class Episode:
    """Start of an episode: one row of the dataset, one of its G repetitions.

    A row may name the tools it is offered in `row["tools"]`; without that it is offered all.
    """

    messages: tuple[Message, ...]
    row: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    seed: int | None = None
    number: int = 0  # its place in the rollout


class Player(Protocol):
    """An agent of the user's, behind the gateway.

    It plays over the same engine, format and limits; each episode yields exactly one trajectory.
    """

    async def play(self, episode: Episode, shared: EpisodeRunner) -> Trajectory:
        """Play one episode to its end, whatever comes."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """The parts of a run, and what the episodes of one rollout share beside them."""

    parts: Rollouts
    options: SamplingOptions
    on_turn: Callable[[Episode, Turn], None] | None = None
    waiting: AbstractContextManager[None] = field(default_factory=nullcontext)  # while an episode waits for the engine

    async def sample(self, request: SampleRequest) -> Sample:
        """Ask the engine.

        A request that failed is tried again a few times, unless its engine did so itself.
        """
        for retry in range(self.parts.engine_retries + 1):
            try:
                with self.waiting:
                    sample = await self.parts.engine.sample(request)
                check_sample(sample, self.parts.vocabulary)
                return sample
            except EngineError as error:
                if isinstance(error, FinalEngineError) or retry == self.parts.engine_retries:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S * 2**retry)
        raise AssertionError("unreachable: the last retry raises")


class Scheduler:
    """Runs what is submitted to it, between entering and leaving it.

    Leaving waits for all that is open.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        max_concurrent: int | None = None,
        on_done: Callable[[Episode, Trajectory], None] | None = None,
        gate: asyncio.Semaphore | None = None,
    ) -> None:
        self._waiting = _BusyTime(runner.parts.clock)
        self._runner = replace(runner, waiting=self._waiting)
        self._gate: AbstractAsyncContextManager[None] = gate or nullcontext()
        if gate is None and max_concurrent is not None:
            self._gate = asyncio.Semaphore(max_concurrent)
        self._on_done = on_done
        self._tasks = asyncio.TaskGroup()
        self._started_s = 0.0
        self._stopped_s: float | None = None

    def submit(self, episode: Episode) -> Handle:
        """Run this episode as soon as there is room, after those that were submitted before it."""
        return self._tasks.create_task(self._run(episode))

    @property
    def times(self) -> RolloutTimes:
        """Return how long the scheduler has been open,
        and how much of that nobody waited for the engine.
        """
        now = self._runner.parts.clock() if self._stopped_s is None else self._stopped_s
        duration_s = now - self._started_s
        return RolloutTimes(duration_s, max(0.0, duration_s - self._waiting.total_s), self._started_s)

    async def __aenter__(self) -> Scheduler:
        self._started_s = self._runner.parts.clock()
        # the engine first: an engine that cannot open leaves no task behind
        await self._runner.parts.engine.open()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._tasks.__aexit__(*raised)
        except BaseExceptionGroup as errors:
            # Siblings only end with cancellation, so the first one is what went wrong; it keeps its
            # type and traceback.
            raise errors.exceptions[0] from None
        finally:
            # after the tasks, whose requests it would fail otherwise; and also when they failed
            await self._runner.parts.engine.close()
            self._stopped_s = self._runner.parts.clock()

    async def _run(self, episode: Episode) -> Trajectory:
        """Play one to its end, by our own loop or what plays in its place."""
        runner, player = self._runner, self._runner.parts.player
        # inside the task, so a handle that waits at the gate can be cancelled like one that runs
        async with self._gate:
            playing = EpisodeRun(runner, episode).play() if player is None else player.play(episode, runner)
            trajectory = await playing
        if self._on_done is not None:
            self._on_done(episode, trajectory)
        return trajectory


async def run_all(episodes: Iterable[Episode], scheduler: Scheduler) -> RolloutBatch:
    """Open a scheduler, run these episodes in it, and close it; return them in their order, with where the time went."""
    async with scheduler:
        handles = [(episode, scheduler.submit(episode)) for episode in episodes]
    batch = RolloutBatch(
        episodes=tuple(Scored(episode.row, handle.result()) for episode, handle in handles), times=scheduler.times
    )
    # only now: the siblings of a lost episode have ended, and its engine is closed
    check_complete(batch.trajectories)
    return batch


def check_complete(trajectories: Sequence[Trajectory]) -> None:
    """Raise `EngineError` if an episode was lost to an infrastructure failure."""
    lost = [t for t in trajectories if t.stop_reason is StopReason.ENGINE_FAILURE]
    if lost:
        raise EngineError(
            f"{len(lost)} of {len(trajectories)} episodes could not be completed, after retries; the first failed with: "
            f"{lost[0].failure}. Nothing was trained on this batch. Fix the cause and resume from the last checkpoint."
        )


class HoldingLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that `timers_held` stops.

    A reward that is asked in the middle of a rollout runs in the loop's thread and may take seconds.
    No deadline of an episode or a tool counts them: what ended meanwhile has ended in time.
    """

    held_s = 0.0

    def time(self) -> float:
        return super().time() - self.held_s


@contextmanager
def timers_held() -> Iterator[None]:
    """Let the block take no time for the timers of the running loop, if that is a `HoldingLoop`."""
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    try:
        yield
    finally:
        if isinstance(loop, HoldingLoop):
            loop.held_s += time.monotonic() - started


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own, in another thread where this one already has a loop: in a notebook."""

    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    def run() -> T:
        # The main task returns nothing: asyncio makes a repr of it when it ends (through
        # signal.getsignal), and the repr of a whole rollout takes longer than scheduling it.
        outcome: list[T] = []

        async def main() -> None:
            task = asyncio.current_task()
            assert task is not None
            running.append((asyncio.get_running_loop(), task))
            outcome.append(await work)

        with asyncio.Runner(loop_factory=HoldingLoop) as runner:
            runner.run(main())
        return outcome[0]

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()

    with ThreadPoolExecutor(1, thread_name_prefix="toolgrpo-rollout") as thread:
        ended = thread.submit(on_this_device(run))
        try:
            return ended.result()
        except BaseException:  # KeyboardInterrupt, of a notebook: cancel it and see it end
            for loop, task in running:
                with suppress(RuntimeError):  # it came to its end meanwhile
                    loop.call_soon_threadsafe(task.cancel)
            raise


class _BusyTime:
    """Total time during which at least one `with` block was open."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._since_s = 0.0
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        return self._total_s + (self._clock() - self._since_s if self._open else 0.0)

    def __enter__(self) -> None:
        if self._open == 0:
            self._since_s = self._clock()
        self._open += 1

    def __exit__(self, *failure: object) -> None:
        self._open -= 1
        if self._open == 0:
            self._total_s += self._clock() - self._since_s
