"""`Rollouts`: rows in, a `RolloutBatch` out.

What trains, what evaluates and what only wants episodes are its customers.

It knows an engine, a chat format and tools, and nothing of what the episodes are for: no rewards,
no trainer, no files. Each process has its own and waits for no other inside `run`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import Engine, SamplingOptions
from toolgrpo.episode.trajectory import Trajectory, Turn
from toolgrpo.rollout.batch import Mode, RolloutBatch, Row
from toolgrpo.rollout.limits import EpisodeLimits, TextTokenizer
from toolgrpo.rollout.observers import EpisodeDone, Observers, RolloutBegan, RolloutEnded, TurnDone
from toolgrpo.rollout.row_parts import as_messages, thinking_of
from toolgrpo.rollout.scheduler import Episode, EpisodeRunner, Player, Scheduler, run_all, run_blocking
from toolgrpo.tools.base import ToolProvider


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Shared parts of all rollouts of a run. It closes the engine, and tools that are nobody else's."""

    engine: Engine
    chat: ChatFormat
    limits: EpisodeLimits
    tokenizer: TextTokenizer  # long tool results are cut in its tokens
    tools: ToolProvider | None = None
    closes_tools: bool = True  # False: they belong to somebody who goes on with them
    observers: Observers = field(default_factory=Observers)
    vocabulary: int | None = None  # how many ids the model has
    engine_retries: int = 3
    unmarked_calls: str = "answer"  # one of `options.EpisodeOptions`
    max_concurrent: int | None = None  # episodes at a time; None: all
    enable_thinking: bool | None = None  # a row's own column of this name comes first
    player: Player | None = None  # plays the episodes in place of our own loop
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.limits.context is not None:
            self.limits.context.check_window(self.engine.max_model_len)

    def run(
        self,
        rows: Sequence[Row],
        options: SamplingOptions,
        *,
        step: int = 0,
        mode: Mode = "train",
        label: str = "episodes",
        group_size: int = 1,
        offset: int = 0,
    ) -> RolloutBatch:
        """Run one episode per row and return them in the order of the rows, not graded yet."""
        began = RolloutBegan(len(rows), step, mode, label)
        with self.telling(began):
            episodes = [self.episode(row, number) for number, row in enumerate(rows)]
            batch = run_blocking(run_all(episodes, self.scheduler(options, began)))
        return replace(batch, step=step, mode=mode, group_size=group_size, offset=offset)

    @contextmanager
    def telling(self, began: RolloutBegan) -> Iterator[None]:
        """Tell the observers that the rollout in the block begins, and how it ended."""
        self.observers.rollout_began(began)
        try:
            yield
        except BaseException as error:
            self.observers.rollout_ended(RolloutEnded(began, f"{type(error).__name__}: {error}"))
            raise
        self.observers.rollout_ended(RolloutEnded(began))

    def close(self) -> None:
        """End the engine, the tool workers, the player and the observers."""
        with ExitStack() as closing:
            closing.callback(self.observers.close)
            if self.player is not None:
                closing.callback(self.player.close)
            if self.tools is not None and self.closes_tools:
                closing.callback(self.tools.close)
            self.engine.shutdown()

    def scheduler(
        self, options: SamplingOptions, began: RolloutBegan, *, gate: asyncio.Semaphore | None = None
    ) -> Scheduler:
        """Return a scheduler for `episode`s: `run` is a loop around one, `GroupQueue`
        another, which draws more rows as it goes. Several share a `gate`.
        """

        def on_turn(episode: Episode, turn: Turn) -> None:
            self.observers.turn_done(TurnDone(began, episode.number, episode.row, turn))

        def on_done(episode: Episode, trajectory: Trajectory) -> None:
            self.observers.episode_done(EpisodeDone(began, episode.number, episode.row, trajectory))

        runner = EpisodeRunner(self, options, on_turn if self.observers.hear_turns else None)
        return Scheduler(runner, max_concurrent=self.max_concurrent, on_done=on_done, gate=gate)

    def episode(self, row: Row, number: int) -> Episode:
        """Return what an episode of this row starts from; `number` is its place in the rollout."""
        return Episode(
            messages=as_messages(row["prompt"]),
            row=row,
            enable_thinking=thinking_of(row, self.enable_thinking),
            number=number,
        )
