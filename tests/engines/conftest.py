"""A server on loopback with enough of vLLM's HTTP, and a rollout of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from toolgrpo.engines.base import Engine
from toolgrpo.testing.vllm_stand_in import StandInVLLM

T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[StandInVLLM]:
    with StandInVLLM() as running:
        yield running


def during_a_rollout(engine: Engine, work: Callable[[], Awaitable[T]], timeout_s: float = 600) -> T:
    """Each call is a rollout with an event loop of its own, as in training."""

    async def main() -> T:
        await engine.open()
        try:
            async with asyncio.timeout(timeout_s):
                return await work()
        finally:
            await engine.close()

    return asyncio.run(main())
