"""Episodes before they start, what those of one rollout share, and who plays them in place of our own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.checks import check_sample
from toolgrpo.episode.trajectory import Message, Trajectory, Turn
from toolgrpo.errors import EngineError, FinalEngineError
from toolgrpo.rollout.episode import EpisodeRun

if TYPE_CHECKING:
    from toolgrpo.rollout.rollouts import Rollouts

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
    """The parts of a run, and what the episodes of one rollout share beside them. Calling it runs one to its end."""

    parts: Rollouts
    options: SamplingOptions
    on_turn: Callable[[Episode, Turn], None] | None = None
    waiting: AbstractContextManager[None] = field(
        default_factory=nullcontext
    )  # entered while an episode waits for the engine

    async def __call__(self, episode: Episode) -> Trajectory:
        if self.parts.player is not None:
            return await self.parts.player.play(episode, self)
        return await EpisodeRun(self, episode).play()

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
