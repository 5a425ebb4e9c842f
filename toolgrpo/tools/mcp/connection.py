"""One connection to one MCP server, on a loop thread that outlives training steps.

The SDK's client must be entered and left by one task, so a task of its own keeps each connection. A
connection that broke is opened again by the next call, with a pause that grows while that fails. A
server that let a call overrun is asked for its tools; if that gets no answer either, it counts as
broken.

Bounds: the listing has one deadline over all its pages, and a number of tools; a message has a
number of bytes; results are text, and the schemas that servers give for them are not looked at (the
SDK would match their patterns without a bound).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import mcp_types
import pydantic
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from toolgrpo.calls import ToolErrorKind
from toolgrpo.errors import PluginError
from toolgrpo.tools.base import Reply
from toolgrpo.tools.mcp.config_file import McpServerConfig
from toolgrpo.tools.mcp.stdio import MAX_MESSAGE_BYTES, Keepers, ServerOutput, stdio_transport
from toolgrpo.tools.render import cut, describe_exception
from toolgrpo.tools.workers.output_log import OutputLog

_PROBE_TIMEOUT_S = 5.0
_MAX_PAUSE_S = 30.0
_CLOSE_TIMEOUT_S = 12.0  # longer than a transport takes to kill a server that does not want to end
_LAST_WORDS_TIMEOUT_S = 1.0
_MAX_TOOLS = 1000
_TOO_LONG = f"the server answered with more than {MAX_MESSAGE_BYTES:,} bytes"

logging.getLogger("mcp").addHandler(logging.NullHandler())  # or its tracebacks for bad answers reach the terminal


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What the connections of one backend share."""

    connect_timeout_s: float
    max_result_chars: int
    log: OutputLog
    keepers: Keepers


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

    def __init__(self, config: McpServerConfig, options: ConnectionOptions) -> None:
        self._config = config
        self._options = options
        self._open: _Open | None = None
        self._opening: asyncio.Task[_Open] | None = None
        self._output: ServerOutput | None = None
        self._failures = 0
        self._not_before = 0.0
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()

    async def list_tools(self) -> list[mcp_types.Tool]:
        """List every tool of the server, all pages; PluginError if it has none to give."""
        tools: list[mcp_types.Tool] = []
        limit_s = self._options.connect_timeout_s
        try:
            client = (await self._connected()).client
            async with asyncio.timeout(limit_s):
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor, cache_mode="bypass")
                    tools += page.tools
                    cursor = page.next_cursor
                    if len(tools) > _MAX_TOOLS:
                        raise PluginError(f"{self._name} lists more than {_MAX_TOOLS} tools")
                    if cursor is None:
                        return tools
        except PluginError:
            raise
        except ServerDown as error:
            raise PluginError(f"{error}. Check its command or URL in the MCP configuration.") from error
        except TimeoutError as error:
            detail = f"it had not come to the end of its tools within {limit_s:g} s; there were {len(tools)} by then"
            raise PluginError(await self._with_last_words(f"{self._name} cannot be used: {detail}")) from error
        except Exception as error:  # a server can answer with anything: the SDK's errors, pydantic's, bare ones
            detail = f"its tools cannot be listed ({_describe(error)})"
            raise PluginError(await self._with_last_words(f"{self._name} cannot be used: {detail}")) from error

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Reply:
        """Make one call; a server that is down or dies is an error that the model reads."""
        started = time.monotonic()
        reply = await self._call(name, arguments, timeout_s)
        return reply.timed(started, time.monotonic())

    async def close(self) -> None:
        """Leave the server for good, also if it is just being reached."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening], timeout=2 * _CLOSE_TIMEOUT_S)
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
        except pydantic.ValidationError as error:
            return Reply(f"{self._name} answered with what is no result ({_describe(error)})", ToolErrorKind.BAD_RESULT)
        except Exception as error:  # the SDK lets errors of its transports through: httpx2, anyio, OSError, groups
            how = f"failed ({_describe(error)})"
        text = await self._with_last_words(f"{self._name} {how}; it is started again")
        if connection is not None:
            self._later(self._drop(connection))
        return Reply(text, ToolErrorKind.DIED)

    @property
    def _name(self) -> str:
        return f"the server '{self._config.name}'"

    async def _with_last_words(self, text: str) -> str:
        """Return the sentence with what the server printed last, if it printed anything."""
        if self._output is None:
            return text
        with suppress(TimeoutError):
            await asyncio.wait_for(self._output.ended.wait(), _LAST_WORDS_TIMEOUT_S)
        words = self._output.last_words()
        return f"{text}. The last it printed: {words}" if words else text

    def _reply(self, result: mcp_types.CallToolResult) -> Reply:
        parts = [_content_text(block) for block in result.content]
        if not parts and result.structured_content is not None:
            parts = [mcp_types.CallToolResult.model_dump_json(result, include={"structured_content"})]
        rendered = cut("\n".join(parts), self._options.max_result_chars)
        error = ToolErrorKind.RAISED if result.is_error else None
        return Reply(rendered.text, error, left_out=rendered.left_out)

    async def _connected(self) -> _Open:
        """Return the connection, opened if need be.

        The opening outlives a caller whose deadline comes first.
        """
        if self._open is not None and not self._open.task.done():
            return self._open
        if self._closed:
            raise ServerDown(f"{self._name} is closed")
        if self._opening is None:
            if time.monotonic() < self._not_before:
                raise ServerDown(f"{self._name} is down; it is tried again later")
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
            client = await asyncio.wait_for(asyncio.shield(entered), self._options.connect_timeout_s)
        except BaseException as error:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=_CLOSE_TIMEOUT_S)
            if isinstance(error, asyncio.CancelledError):
                raise
            reason = (
                f"no answer within {self._options.connect_timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else _describe(error)
            )
            text = await self._with_last_words(f"{self._name} cannot be reached: {reason}")
            raise ServerDown(text) from error
        return _Open(client, task, leave)

    async def _keep(self, entered: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Enter the client, stay until told to leave, leave."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                client.session.validate_tool_result = _unchecked  # type: ignore[method-assign]  # the SDK has no switch
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
            headers = {"accept-encoding": "identity", **config.headers}
            client = httpx2.AsyncClient(headers=headers, timeout=None, event_hooks={"response": [_bound_answer]})
            http = await stack.enter_async_context(client)
            return streamable_http_client(config.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES)
        self._output = ServerOutput(self._options.log)
        return stdio_transport(config, self._output, self._options.keepers)

    async def _probe(self, connection: _Open, timeout_s: float) -> None:
        """Drop the connection if the server gives no answer at all after a call that overran."""
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


async def _unchecked(name: str, result: mcp_types.CallToolResult) -> None:
    """Take the result as it is; it becomes text."""


async def _bound_answer(response: httpx2.Response) -> None:
    """Break off an answer that is too long to hold, or that would be once it is unpacked."""
    if response.headers.get("content-encoding", "identity") != "identity":
        response.stream = _BoundedStream(response.stream, 0, "the server packs its answers, though asked not to")
    elif not response.headers.get("content-type", "").startswith("text/event-stream"):  # the SDK bounds each event
        response.stream = _BoundedStream(response.stream, MAX_MESSAGE_BYTES, _TOO_LONG)


class _BoundedStream(httpx2.AsyncByteStream):
    """Raises what the SDK makes an error of the one call that is answered."""

    def __init__(self, inner: Any, max_bytes: int, problem: str) -> None:
        self._inner = inner
        self._left = max_bytes
        self._problem = problem

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._left -= len(part)
            if self._left < 0:
                raise httpx2.StreamError(self._problem)
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


def _describe(error: BaseException) -> str:
    error = _first_error(error)
    if isinstance(error, pydantic.ValidationError):
        wrong = error.errors(include_url=False, include_input=False)[0]
        return cut(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}", 300).text
    return describe_exception(error, 300)


def _first_error(error: BaseException) -> BaseException:
    """Return the first real error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
