"""Rollouts over fakes, and what they may leave behind."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

from toolgrpo.rollout import Episode, EpisodeLimits, EpisodeRunner, RolloutBatch, Rollouts, Scheduler
from toolgrpo.rollout.scheduler import run_all, run_blocking
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools


def scripted_rollouts(
    engine: ScriptedEngine, tools: ScriptedTools | None = None, *, limits: dict[str, Any] | None = None, **more: Any
) -> Rollouts:
    """Return the rollouts of this engine, without retries and with 200 tokens an episode unless told otherwise."""
    return Rollouts(
        engine=engine,
        chat=ByteChat(),
        limits=EpisodeLimits(**{"max_completion_length": 200, **(limits or {})}),
        tokenizer=ByteChat(),
        tools=tools,
        engine_retries=0,
        **more,
    )


def no_rollout_thread() -> bool:
    """Say if no thread of rollouts that run ahead is left; where one stands is printed."""
    left = [thread for thread in threading.enumerate() if thread.name.startswith("toolgrpo-rollouts")]
    for thread in left:
        frame = sys._current_frames().get(thread.ident or 0)
        print(f"{thread.name} is left at", *traceback.format_stack(frame))
    return not left


def run_together(episodes: Iterable[Episode], runner: EpisodeRunner) -> RolloutBatch:
    """Run these episodes to their ends, on an event loop of their own."""
    return run_blocking(run_all(episodes, Scheduler(runner)))
