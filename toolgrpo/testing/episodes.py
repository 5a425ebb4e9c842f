"""Episodes over fakes: what a script says goes through the real episode loop, and comes back as a trajectory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout import Episode, EpisodeLimits, EpisodeRunner, Player, Rollouts
from toolgrpo.rollout.limits import TextTokenizer
from toolgrpo.testing.chat import ByteChat
from toolgrpo.testing.clock import FakeClock
from toolgrpo.testing.engine import ScriptedEngine
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trajectory import Trajectory


def scripted_runner(
    engine: ScriptedEngine,
    tools: ToolProvider | None = None,
    *,
    chat: ChatFormat | None = None,
    tokenizer: TextTokenizer | None = None,
    engine_retries: int = 0,
    unmarked_calls: str = "answer",
    player: Player | None = None,
    vocabulary: int | None = None,
    clock: FakeClock | None = None,
    **limits: Any,
) -> EpisodeRunner:
    """Return what runs episodes over this engine, with `ByteChat` and 1000 tokens an episode unless told otherwise."""
    parts = Rollouts(
        engine=engine,
        chat=chat or ByteChat(),
        limits=EpisodeLimits(**{"max_completion_length": 1000, **limits}),
        tokenizer=tokenizer or ByteChat(),
        tools=tools,
        engine_retries=engine_retries,
        unmarked_calls=unmarked_calls,
        player=player,
        vocabulary=vocabulary,
        clock=clock or time.monotonic,
    )
    return EpisodeRunner(parts, SamplingOptions())


def run_episode(
    engine: ScriptedEngine,
    tools: ToolProvider | None = None,
    *,
    question: str = "q",
    row: Mapping[str, Any] | None = None,
    enable_thinking: bool | None = None,
    clock: FakeClock | None = None,
    **options: Any,
) -> Trajectory:
    """Run one episode to its end and close the engine; `options` are those of `scripted_runner`.

    Without a `clock` time is real, as tools in processes of their own need it.
    """
    runner = scripted_runner(engine, tools, clock=clock, **options)
    episode = Episode(({"role": "user", "content": question},), row=row or {}, enable_thinking=enable_thinking)

    async def main() -> Trajectory:
        await engine.open()
        try:
            return await runner(episode)
        finally:
            await engine.close()

    return asyncio.run(main()) if clock is None else clock.run(main())
