"""Calls, as a chat format would have read them, and their results from tools that are real."""

from __future__ import annotations

import asyncio

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolResult
from toolgrpo.tools.base import ToolProvider


def attempt(name: str, **arguments: object) -> CallAttempt:
    """Return a well-formed call, as a chat format would have read it."""
    return CallAttempt(AttemptStatus.OK, "", name, arguments)


def call_all(tools: ToolProvider, *attempts: CallAttempt) -> tuple[ToolResult, ...]:
    """Return what the tools answer to these calls of one turn, in an episode of its own."""

    async def run() -> tuple[ToolResult, ...]:
        async with tools.session({}) as session:
            return await session.call(attempts)

    return asyncio.run(run())
