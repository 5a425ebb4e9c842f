"""Episodes over fakes: what a script says goes through the real episode loop, and comes back as a trajectory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from toolgrpo.chat.base import ChatFormat
from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.rollout import Episode, EpisodeLimits, EpisodeRunner, Player, Rollouts
from toolgrpo.rollout.truncation import TextTokenizer
from toolgrpo.segments import Segment, first_columns
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


def of_several_turns(request: SampleRequest, number: int) -> list[int]:
    """Script episodes of one to three turns, which call `look`, and answers of several lengths.

    Only a first turn knows its number, so that two runs of the same questions say the same.
    """
    turns, asked = request.ids.count(ByteChat.end), sum(request.ids)
    varied = asked + 5 * number if turns < 2 else asked
    if turns < 4 and varied % 3:
        return ByteChat.say(f'call look {{"at": {varied % 7}}}')
    return ByteChat.say("abcdefghijklm"[: 1 + varied % 13])


def cut_into_segments(whole: Trajectory, *places: int) -> Trajectory:
    """Return an episode of one segment as one of several, each of which goes on where another was cut.

    A segment's prompt is all that stands before its place, so every sampled token has read what it
    had read, and whatever learns from the two must learn the same.
    """
    ends = [0, *places, len(whole.ids)]
    segments = [
        Segment(
            (*whole.prompt_ids, *whole.ids[:start]),
            whole.ids[start:end],
            whole.mask[start:end],
            whole.logprobs[start:end],
            number - 1 if number else None,
        )
        for number, (start, end) in enumerate(pairwise(ends))
    ]
    moved: dict[int, int] = {}  # where a token of the whole episode stands in the row of the cut one
    for first, (start, end) in zip(first_columns(segments), pairwise(ends), strict=True):
        moved |= {place: first + place - start for place in range(start, end)}
    return Trajectory.of_segments(
        segments,
        messages=whole.messages,
        turns=[replace(turn, start=moved[turn.start], end=moved[turn.end - 1] + 1) for turn in whole.turns],
        **{
            name: getattr(whole, name)
            for name in ("stop_reason", "started_s", "duration_s", "failure", "reward", "metadata", "dropped")
        },
    )
