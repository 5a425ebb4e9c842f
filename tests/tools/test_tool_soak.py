"""Hundreds of episodes with random faults among them: no lost or wrong answer, nothing leaked, workers restored."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.tool_calls import attempt
from toolgrpo.tools import Toolbox, load_tools

pytestmark = pytest.mark.e2e

HOSTILE = Path(__file__).parents[1] / "fixtures" / "tools" / "hostile_tools.py"
FAULTS = (
    "segfault", "exit_hard", "exit_softly", "raise_base", "recurse", "change_directory",
    "fork_and_return", "unserialisable", "leave_child", "close_descriptors", "sleep_forever", "regex_loop",
    "async_sleep_forever",
)  # fmt: skip


def soak(toolbox: Toolbox, episodes: int, seed: int) -> list[str]:
    """What honest episodes were told that is wrong."""
    rng = random.Random(seed)
    wrong: list[str] = []

    async def episode(i: int, fault: str | None, room: asyncio.Semaphore) -> None:
        async with room, toolbox.session({}) as session:
            if fault is not None:
                assert len(await session.call([attempt(fault)])) == 1
                return
            results = await session.call([attempt("length", words=["a"] * (i % 7)), attempt("nap", seconds=0.01)])
            if [result.content for result in results] != [str(i % 7), "slept 0.01"]:
                wrong.extend(result.content for result in results)

    async def run() -> None:
        room = asyncio.Semaphore(24)
        faults = [rng.choice(FAULTS) if rng.random() < 0.15 else None for _ in range(episodes)]
        await asyncio.gather(*(episode(i, fault, room) for i, fault in enumerate(faults)))

    asyncio.run(run())
    return wrong


class Held(NamedTuple):
    """What this process holds."""

    descriptors: int
    threads: int


def settled() -> Held:
    """Once it has not changed for two seconds: workers that were being replaced when the last answer came are there."""
    deadline = time.monotonic() + 120
    seen: list[Held] = []
    while len(seen) < 20 or len(set(seen[-20:])) > 1:
        assert time.monotonic() < deadline, seen[-20:]
        seen.append(Held(len(os.listdir("/proc/self/fd")), threading.active_count()))
        time.sleep(0.1)
    return seen[-1]


@pytest.mark.parametrize(("episodes", "rounds"), [(120, 2), pytest.param(1000, 8, marks=pytest.mark.slow)])
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_faults_cost_their_own_calls(tmp_path: Path, episodes: int, rounds: int) -> None:
    with load_tools(HOSTILE, workers=2, tool_timeout_s=1.0, log_path=tmp_path / "tools.log") as toolbox:
        assert soak(toolbox, episodes, seed=0) == []
        before = settled()
        for seed in range(1, rounds):
            assert soak(toolbox, episodes, seed) == []
        after = settled()
        assert after.descriptors <= before.descriptors and after.threads <= before.threads
