"""Episodes before they start, and the parts that those of one rollout share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import Engine, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.checks import check_sample
from toolgrpo.errors import EngineError, FinalEngineError
from toolgrpo.rollout.episode import play_episode
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.rollout.player import Player
from toolgrpo.rollout.truncation import TextTokenizer
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trajectory import Message, Trajectory, Turn

_RETRY_PAUSE_S = 0.5


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


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Shared parts of the episodes of one rollout. Calling it runs one episode to its end."""

    engine: Engine
    chat: ChatFormat
    limits: EpisodeLimits
    options: SamplingOptions
    tokenizer: TextTokenizer  # long results are cut in its tokens
    tools: ToolProvider | None = None
    vocabulary: int | None = None  # how many ids the model has
    engine_retries: int = 3
    unmarked_calls: str = "answer"  # one of `options.EpisodeOptions`
    clock: Callable[[], float] = time.monotonic
    waiting: AbstractContextManager[None] = field(
        default_factory=nullcontext
    )  # entered while an episode waits for the engine
    on_turn: Callable[[Episode, Turn], None] | None = None
    player: Player | None = None  # None: our own loop plays

    async def __call__(self, episode: Episode) -> Trajectory:
        if self.player is not None:
            return await self.player.play(episode, self)
        return await play_episode(self, episode)

    async def sample(self, request: SampleRequest) -> Sample:
        """Ask the engine.

        A request that failed is tried again a few times, unless its engine did so itself.
        """
        for retry in range(self.engine_retries + 1):
            try:
                with self.waiting:
                    sample = await self.engine.sample(request)
                check_sample(sample, self.vocabulary)
                return sample
            except EngineError as error:
                if isinstance(error, FinalEngineError) or retry == self.engine_retries:
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S * 2**retry)
        raise AssertionError("unreachable: the last retry raises")
