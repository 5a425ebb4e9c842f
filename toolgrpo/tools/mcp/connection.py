"""One connection to one MCP server, on a loop thread that outlives training steps.

The SDK's client must be entered and left by one task, so a task of its own keeps each connection. A connection that broke
is opened again by the next call, with a pause that grows while that fails. A server that let a call overrun is asked for
its tools; if that gets no answer either, it counts as broken.

Not covered: a frozen stdio server outlives a trainer that was killed (a sound one ends with its stdin).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import mcp_types
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from toolgrpo.tools.mcp.config_file import McpServerConfig
from toolgrpo.tools.render import cut, describe_exception
from toolgrpo.tools.tool_reply import Reply
from toolgrpo.trajectory import ToolErrorKind

__all__ = ["McpConnection", "ServerDown"]

_PROBE_TIMEOUT_S = 5.0
_MAX_PAUSE_S = 30.0
_CLOSE_TIMEOUT_S = 8.0


class ServerDown(Exception):
    """The server cannot be reached now; the message says why."""


@dataclass(slots=True)
class _Open:
    """A living connection and the task that keeps it."""

    client: Client
    task: asyncio.Task[None]
    leave: asyncio.Event


class McpConnection:
    """All methods run on one loop."""

    def __init__(self, config: McpServerConfig, connect_timeout_s: float, max_result_chars: int) -> None:
        self._config = config
        self._connect_timeout_s = connect_timeout_s
        self._max_result_chars = max_result_chars
        self._open: _Open | None = None
        self._opening: asyncio.Task[_Open] | None = None
        self._failures = 0
        self._not_before = 0.0
        self._background: set[asyncio.Task[None]] = set()

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Every tool of the server, all pages."""
        client = (await self._connected()).client
        tools: list[mcp_types.Tool] = []
        cursor: str | None = None
        while True:
            page = await asyncio.wait_for(client.list_tools(cursor=cursor), self._connect_timeout_s)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Reply:
        """One call; a server that is down or dies is an error that the model reads."""
        started = time.monotonic()
        reply = await self._call(name, arguments, timeout_s)
        return reply.timed(started, time.monotonic())

    async def close(self) -> None:
        """Leave the server, also if it is just being reached."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._open is not None:
            await self._drop(self._open)
        if self._background:  # connections that are being left: a cancelled one would leave its server running
            await asyncio.wait(self._background, timeout=2 * _CLOSE_TIMEOUT_S)

    async def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Reply:
        connection: _Open | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connected()
                return self._reply(await connection.client.call_tool(name, dict(arguments)))
        except TimeoutError:
            if connection is not None:
                self._later(self._probe(connection, min(_PROBE_TIMEOUT_S, timeout_s)))
            return Reply(f"no answer within {timeout_s:g} s", ToolErrorKind.TIMEOUT)
        except ServerDown as error:
            return Reply(str(error), ToolErrorKind.DIED)
        except MCPError as error:
            if error.code != mcp_types.CONNECTION_CLOSED:
                return Reply(cut(f"{error}", 500).text, ToolErrorKind.RAISED)
            how = "closed the connection"
        except Exception as error:  # the SDK lets errors of its transports through: httpx2, anyio, OSError, groups
            how = f"failed ({describe_exception(_first(error), 200)})"
        if connection is not None:
            self._later(self._drop(connection))
        return Reply(f"the server '{self._config.name}' {how}; it is started again", ToolErrorKind.DIED)

    def _reply(self, result: mcp_types.CallToolResult) -> Reply:
        parts = [_content_text(block) for block in result.content]
        if not parts and result.structured_content is not None:
            parts = [mcp_types.CallToolResult.model_dump_json(result, include={"structured_content"})]
        rendered = cut("\n".join(parts), self._max_result_chars)
        error = ToolErrorKind.RAISED if result.is_error else None
        return Reply(rendered.text, error, truncated=rendered.truncated)

    async def _connected(self) -> _Open:
        """The connection, opened if need be. The opening outlives a caller whose deadline comes first."""
        if self._open is not None and not self._open.task.done():
            return self._open
        if self._opening is None:
            if time.monotonic() < self._not_before:
                raise ServerDown(f"the server '{self._config.name}' is down; it is tried again later")
            self._opening = asyncio.get_running_loop().create_task(self._reopen())
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen by the callers
        return await asyncio.shield(self._opening)

    async def _reopen(self) -> _Open:
        try:
            self._open = await self._connect()
        except ServerDown:
            self._failures += 1
            self._not_before = time.monotonic() + min(_MAX_PAUSE_S, 0.5 * 2**self._failures)
            raise
        finally:
            self._opening = None
        self._failures = 0
        return self._open

    async def _connect(self) -> _Open:
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[Client] = loop.create_future()
        leave = asyncio.Event()
        task = loop.create_task(self._keep(entered, leave))
        try:
            client = await asyncio.wait_for(asyncio.shield(entered), self._connect_timeout_s)
        except BaseException as error:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=_CLOSE_TIMEOUT_S)
            if isinstance(error, asyncio.CancelledError):
                raise
            reason = (
                f"no answer within {self._connect_timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else describe_exception(_first(error), 300)
            )
            raise ServerDown(f"the server '{self._config.name}' cannot be reached: {reason}") from error
        return _Open(client, task, leave)

    async def _keep(self, entered: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Enter the client, stay until told to leave, leave."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                if not entered.done():
                    entered.set_result(client)
                await leave.wait()
        except Exception as error:  # whatever a transport raises; the callers see it through their own calls
            if not entered.done():
                entered.set_exception(error)
        finally:
            entered.cancel()

    async def _transport(self, stack: AsyncExitStack) -> Any:
        config = self._config
        if config.url is not None:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(config.headers), timeout=None))
            return streamable_http_client(config.url, http_client=http)
        assert config.command is not None
        parameters = StdioServerParameters(
            command=config.command, args=list(config.args), env=dict(config.env), cwd=config.cwd
        )
        return stdio_client(parameters, errlog=stack.enter_context(open(os.devnull, "w")))

    async def _probe(self, connection: _Open, timeout_s: float) -> None:
        """After a call that overran: does the server still answer at all?"""
        try:
            await asyncio.wait_for(connection.client.list_tools(cache_mode="bypass"), timeout_s)
        except Exception:  # any failure means the same here
            await self._drop(connection)

    async def _drop(self, connection: _Open) -> None:
        """Leave a connection, and make sure that its server ends."""
        if self._open is connection:
            self._open = None
        connection.leave.set()
        _, pending = await asyncio.wait([connection.task], timeout=_CLOSE_TIMEOUT_S)
        for task in pending:
            task.cancel()

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _content_text(block: object) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    kind = getattr(block, "type", type(block).__name__)
    return f"[{kind} left out: only text can be shown]"


def _first(error: BaseException) -> BaseException:
    """The first real error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
