"""A gateway over a script: what a client of OpenAI's API sees, and the trajectory that comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.gateway.server import Endpoint
from toolgrpo.gateway.session import GatewaySession
from toolgrpo.rollout import Episode
from toolgrpo.testing.engine import ScriptedEngine, scripted_runner

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Visit(Generic[T]):
    """What a visitor returned, and what its episode came to."""

    returned: T
    trajectory: Trajectory
    session: GatewaySession


def visit(engine: ScriptedEngine, visitor: Callable[[str, str], T], *, question: str = "q", **options: Any) -> Visit[T]:
    """Let `visitor(url, key)` be the agent of one episode, in a thread; `options` are those of `scripted_runner`."""

    async def main() -> Visit[T]:
        await engine.open()
        shared = scripted_runner(engine, **options)
        session = GatewaySession(shared, Episode(({"role": "user", "content": question},)))
        endpoint = Endpoint(["policy"], engine.max_model_len)
        try:
            key = endpoint.admit(session.answer, asyncio.get_running_loop())
            returned = await asyncio.to_thread(visitor, endpoint.url, key)
            endpoint.dismiss(key)
            await session.end()
            return Visit(returned, session.trajectory(session.limit or StopReason.FINISHED), session)
        finally:
            endpoint.close()
            await engine.close()

    return asyncio.run(main())
