"""Rollouts that run on a thread of their own, several at a time, while the caller does something else.

    ahead = RolloutsAhead(rollouts)
    first = ahead.begin(rows, options, step=0)   # returns at once
    ahead.begin(more, options, step=1)           # joins the first in the engine
    first.result()                               # when all its episodes have ended
    ahead.forget(first)                          # it was taken
    ahead.hand_over(weights, step=1)             # between two steps of the engine
    ahead.stop()

Who takes what, and when, is `group_queue.py`'s.

Invariants: a rollout that fails raises its own error where its result is asked for; after `stop` there
is no thread, episode, request or tool call. The engine is open from the first rollout that opens it until
the last one has closed it, and each sample bears the steps of the weights that it began and ended with; that happens on one
event loop, so weights change between two steps of the engine. Nothing collective happens on the thread but what the
caller hands over, and it waits for that.

Not covered: what observers would hear while episodes run; `tell` tells it afterwards, in one go.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolgrpo.engines.base import Engine, Sample, SampleRequest, SamplingOptions
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.rollout.batch import RolloutBatch, Row
from toolgrpo.rollout.observers import EpisodeDone, Observers, RolloutBegan, TurnDone
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import run_all
from toolgrpo.support.process_setup import on_this_device

if TYPE_CHECKING:
    import torch


Begun = Future[RolloutBatch]
"""A rollout that was begun."""


class SharedEngine:
    """An engine of an engine, for rollouts that each open and close it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.name
        self.max_model_len = engine.max_model_len
        self.gives_logprobs = engine.gives_logprobs
        self.same_numbers_as_trainer = engine.same_numbers_as_trainer
        self.takes_weights_while_open = engine.takes_weights_while_open
        self._users = 0
        self._opening = asyncio.Lock()
        self._step = 0  # of the weights

    async def open(self) -> None:
        async with self._opening:
            if self._users == 0:
                await self._engine.open()
            self._users += 1

    async def sample(self, request: SampleRequest) -> Sample:
        first = self._step
        sample = await self._engine.sample(request)
        return replace(sample, weights=(first, self._step))

    async def close(self) -> None:
        async with self._opening:
            self._users -= 1
            if self._users == 0:
                await self._engine.close()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], step: int = 0) -> None:
        """Go on with these weights, of a step, also in what is being drawn."""
        self._engine.load_weights(weights)
        self._step = step

    def shutdown(self) -> None:
        """Do nothing: the engine belongs to whoever made it."""


class RolloutsAhead:
    """Runs rollouts of `rollouts` on a thread, from the first `begin` until `stop`."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._begun: list[Begun] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # the thread may end
        self._engine: SharedEngine | None = None
        self._quiet: Rollouts | None = None  # the same, without observers, over the shared engine
        self._gate: asyncio.Semaphore | None = None
        self._running: set[asyncio.Task[Any]] = set()

    def begin(self, rows: Sequence[Row], options: SamplingOptions, *, step: int) -> Begun:
        """Let an episode per row run; those that run already go on beside them."""
        loop, quiet = self._started()
        began = RolloutBegan(len(rows), step, "train", "episodes")
        episodes = [quiet.episode(row, number) for number, row in enumerate(rows)]

        async def run() -> RolloutBatch:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await run_all(episodes, quiet.scheduler(options, began, gate=self._gate))

        begun = asyncio.run_coroutine_threadsafe(run(), loop)
        self._begun.append(begun)
        return begun

    def forget(self, begun: Begun) -> None:
        """Let go of a rollout that has ended and was taken."""
        self._begun.remove(begun)

    def hand_over(
        self, weights: Iterable[tuple[str, torch.Tensor]], step: int, meet: Callable[[], None] = lambda: None
    ) -> None:
        """Go on with these weights, of a step, and what is being drawn too; an engine that cannot ends its rollouts first.

        `meet` waits for the other processes then, which `weights` may need.
        """
        loop, _ = self._started()
        engine = self._engine
        assert engine is not None
        if not engine.takes_weights_while_open:
            self.settle()
            meet()

        async def load() -> None:
            engine.load_weights(weights, step)

        asyncio.run_coroutine_threadsafe(load(), loop).result()

    def settle(self) -> None:
        """Wait until every rollout that was begun has ended, so that the engine is free."""
        wait(self._begun)

    def stop(self) -> None:
        """Cancel what runs, see it end, and end the thread. Safe to call twice."""
        loop, thread = self._loop, self._thread
        self._begun.clear()
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_ended(self._running), loop).result()
        self._loop = self._thread = self._engine = self._quiet = self._gate = None
        self._over.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _started(self) -> tuple[asyncio.AbstractEventLoop, Rollouts]:
        if self._loop is None or self._quiet is None:
            self._loop = asyncio.new_event_loop()
            self._over.clear()
            self._engine = engine = SharedEngine(self._rollouts.engine)
            self._quiet = replace(self._rollouts, engine=engine, observers=Observers())
            most = self._rollouts.max_concurrent
            self._gate = None if most is None else asyncio.Semaphore(most)
            serve = on_this_device(partial(_serve, self._loop, self._over))
            self._thread = threading.Thread(target=serve, name="toolgrpo-rollouts-ahead", daemon=True)
            self._thread.start()
        return self._loop, self._quiet


def _serve(loop: asyncio.AbstractEventLoop, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(SystemExit, KeyboardInterrupt):  # the task has it; the loop serves the others
            loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())


async def _ended(rollouts: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel rollouts and wait until each has let go of everything; then what is left on the loop."""
    await _cancelled({*rollouts})
    own = asyncio.current_task()
    await _cancelled({task for task in asyncio.all_tasks() if task is not own})


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def tell(observers: Observers, began: RolloutBegan, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> None:
    """Tell what was not told while it ran: the episodes in the order in which they ended."""
    ended = sorted(enumerate(trajectories), key=lambda one: one[1].started_s + one[1].duration_s)
    for number, trajectory in ended:
        if observers.hear_turns:
            for turn in trajectory.turns:
                observers.turn_done(TurnDone(began, number, rows[number], turn))
        observers.episode_done(EpisodeDone(began, number, rows[number], trajectory))
