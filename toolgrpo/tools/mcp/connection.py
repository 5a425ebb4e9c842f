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
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import mcp_types
import pydantic
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from confined_python.processes import linux
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.errors import PluginError
from toolgrpo.tools.base import Reply
from toolgrpo.tools.mcp.config_file import McpServerConfig
from toolgrpo.tools.mcp.keeper import MAX_MESSAGE_BYTES
from toolgrpo.tools.render import cut, describe_exception
from toolgrpo.tools.workers.output_log import OutputLog

_KEEPER = "import sys; sys.path[:0] = sys.argv[1:3]; from toolgrpo.tools.mcp.keeper import main; main(int(sys.argv[3]), sys.argv[4:])"
_PATHS = (str(Path(__file__).parents[3]), str(Path(linux.__file__).parents[2]))  # of the two packages
_PROBE_TIMEOUT_S = 5.0
_SESSION_LOST = (mcp_types.INVALID_REQUEST, -32001)  # how servers say that they know a session no more
_MAX_PAUSE_S = 30.0
_CLOSE_TIMEOUT_S = 12.0  # longer than a transport takes to kill a server that does not want to end
_LAST_WORDS_TIMEOUT_S = 1.0
_TAIL_BYTES = 4000
_MAX_TOOLS = 1000
_TOO_LONG = f"the server answered with more than {MAX_MESSAGE_BYTES:,} bytes"

logging.getLogger("mcp").addHandler(logging.NullHandler())  # or its tracebacks for bad answers reach the terminal


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The options that the connections of one backend share."""

    connect_timeout_s: float
    max_result_chars: int
    log: OutputLog
    mark: str  # a variable in the environment of every process


class ServerDown(Exception):
    """The server cannot be reached now; the message says why."""


class _Link:
    """A connection that is opened, open or left; `client` comes when it is open."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.client.add_done_callback(lambda client: client.cancelled() or client.exception())  # callers may be gone
        self.leave = asyncio.Event()
        self.probed = False


class McpConnection:
    """All methods run on one loop."""

    def __init__(self, config: McpServerConfig, options: ConnectionOptions) -> None:
        self._config = config
        self._options = options
        self._name = f"the server '{config.name}'"
        self._link: _Link | None = None
        self._output: _ServerOutput | None = None
        self._refusal = ""  # the status of the last answer over HTTP, if it was one
        self._failures = 0
        self._not_before = 0.0
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # a cancelled one would leave its server running

    async def list_tools(self) -> list[mcp_types.Tool]:
        """List every tool of the server, all pages; PluginError if it has none to give."""
        tools: list[mcp_types.Tool] = []
        limit_s = self._options.connect_timeout_s
        try:
            client = (await self._connected()).client.result()
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
            raise PluginError(
                f"{error}. Check its command, or its URL and headers, in the MCP configuration."
            ) from error
        except Exception as error:  # a server can answer with anything: the SDK's errors, pydantic's, bare ones
            detail = f"its tools cannot be listed ({_describe(error)})"
            if isinstance(error, TimeoutError):
                detail = f"it did not finish listing its tools within {limit_s:g} s; there were {len(tools)} by then"
            raise PluginError(await self._with_last_words(f"{self._name} cannot be used: {detail}")) from error

    async def close(self) -> None:
        """Leave the server for good, also if it is just being reached."""
        self._closed = True
        if self._link is not None:
            if not self._link.client.done():
                self._link.task.cancel()
            self._drop(self._link)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _CLOSE_TIMEOUT_S)

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Reply:
        """Make one call; a server that is down or dies is an error that the model reads."""
        link: _Link | None = None
        try:
            link = await self._connected()  # which has a deadline of its own
            async with asyncio.timeout(timeout_s):
                result = await link.client.result().call_tool(name, dict(arguments))
            shown = cut(result_text(result), self._options.max_result_chars)
            return Reply(shown.text, ToolErrorKind.RAISED if result.is_error else None, left_out=shown.left_out)
        except TimeoutError:
            assert link is not None
            self._start(self._probe(link, min(_PROBE_TIMEOUT_S, timeout_s)))
            return Reply(f"no answer within {timeout_s:g} s", ToolErrorKind.TIMEOUT)
        except ServerDown as error:
            return Reply(str(error), ToolErrorKind.DIED)
        except MCPError as error:
            if error.code in _SESSION_LOST and self._config.url is not None and link is not None and not link.probed:
                link.probed = True  # or the request was wrong: asking once tells
                self._start(self._probe(link, min(_PROBE_TIMEOUT_S, timeout_s)))
            if error.code != mcp_types.CONNECTION_CLOSED:
                return Reply(cut(f"{error}", 500).text, ToolErrorKind.RAISED)
            how = "closed the connection"
        except pydantic.ValidationError as error:
            return Reply(f"{self._name} answered with no valid result ({_describe(error)})", ToolErrorKind.BAD_RESULT)
        except Exception as error:  # the SDK lets errors of its transports through: httpx2, anyio, OSError, groups
            how = f"failed ({_describe(error)})"
        text = await self._with_last_words(f"{self._name} {how}; it is started again")
        if link is not None:
            self._drop(link)
        return Reply(text, ToolErrorKind.DIED)

    async def _with_last_words(self, text: str) -> str:
        """Return the sentence with what the server printed last, if it printed anything."""
        words = "" if self._output is None else await self._output.last_words()
        return f"{text}. The last it printed: {words}" if words else text

    async def _connected(self) -> _Link:
        """Return the connection, opened if need be.

        The opening outlives a caller whose deadline comes first.
        """
        link = self._link
        if link is None or link.task.done():
            if self._closed:
                raise ServerDown(f"{self._name} is closed")
            if time.monotonic() < self._not_before:
                raise ServerDown(f"{self._name} is down; it is tried again later")
            link = self._link = _Link()
            link.task = self._start(self._keep(link))
        await asyncio.shield(link.client)
        return link

    async def _keep(self, link: _Link) -> None:
        """Enter the client, stay until told to leave, leave."""
        limit_s, self._refusal = self._options.connect_timeout_s, ""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(limit_s):
                    client = await stack.enter_async_context(Client(await self._transport(stack)))
                client.session.validate_tool_result = _unchecked  # type: ignore[method-assign]  # the SDK has no switch
                self._failures = 0
                link.client.set_result(client)
                await link.leave.wait()
        except BaseException as error:  # whatever a transport raises; the callers see it through their own calls
            if not link.client.done():
                self._failures += 1
                self._not_before = time.monotonic() + min(_MAX_PAUSE_S, 0.5 * 2**self._failures)
                reason = (
                    f"no answer within {limit_s:g} s"
                    if isinstance(error, TimeoutError)
                    else _describe(error) + self._refusal
                )
                text = await self._with_last_words(f"{self._name} cannot be reached: {reason}")
                link.client.set_exception(ServerDown(text))
            if not isinstance(error, Exception):
                raise

    async def _note_refusal(self, response: httpx2.Response) -> None:
        """Remember the status of an answer that is an error: the SDK only says that it is one."""
        if response.request.method == "POST":
            self._refusal = f" (HTTP {response.status_code} {response.reason_phrase})" if response.is_error else ""

    async def _transport(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        config = self._config
        if config.url is not None:
            headers = {"accept-encoding": "identity", **config.headers}
            hooks = {"response": [_bound_answer, self._note_refusal]}
            client = httpx2.AsyncClient(headers=headers, timeout=None, event_hooks=hooks)
            http = await stack.enter_async_context(client)
            return streamable_http_client(config.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES)
        assert config.command is not None
        arguments = ["-I", "-S", "-c", _KEEPER, *_PATHS, str(os.getpid()), config.command, *config.args]
        env = {**config.env, self._options.mark: "1"}
        server = StdioServerParameters(command=sys.executable, args=arguments, env=env, cwd=config.cwd)
        self._output = _ServerOutput(self._options.log)
        return _started(server, self._output)

    async def _probe(self, link: _Link, timeout_s: float) -> None:
        """Drop the connection if the server gives no answer at all after a call that overran."""
        try:
            await asyncio.wait_for(link.client.result().list_tools(cache_mode="bypass"), timeout_s)
        except Exception:  # any failure means the same here
            self._drop(link)
        link.probed = False

    def _drop(self, link: _Link) -> None:
        """Leave a connection, and make sure that its server ends."""
        if self._link is link:
            self._link = None
        link.leave.set()
        asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, link.task.cancel)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _ServerOutput:
    """The output of one server beside its messages: it goes to the log, and its end is kept."""

    def __init__(self, log: OutputLog) -> None:
        self._log = log
        self._tail = b""
        self._ended = asyncio.Event()
        self._pipe, self.write_end = os.pipe()
        os.set_blocking(self._pipe, False)
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def _read(self) -> None:
        if text := os.read(self._pipe, 1 << 16):
            self._tail = (self._tail + text)[-_TAIL_BYTES:]
            self._log.record(text)
        else:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._ended.set()

    async def last_words(self) -> str:
        """Return the last lines, the end of them if they are long; those of one that ends may take a moment."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _LAST_WORDS_TIMEOUT_S)
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-5:])[-400:]


@asynccontextmanager
async def _started(server: StdioServerParameters, output: _ServerOutput) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        with os.fdopen(output.write_end, "w") as errlog:  # closed here once the keeper has it
            streams = await stack.enter_async_context(stdio_client(server, errlog))
        yield streams


def content_text(block: object) -> str | None:
    """Return what a part of a result says, or None if it is no text."""
    if isinstance(block, mcp_types.TextContent):
        return block.text
    resource = block.resource if isinstance(block, mcp_types.EmbeddedResource) else None
    if isinstance(resource, mcp_types.TextResourceContents):
        return resource.text
    if isinstance(block, mcp_types.ResourceLink):
        return " ".join(filter(None, (block.uri, block.title or block.name, block.description)))
    return None


def result_text(result: mcp_types.CallToolResult) -> str:
    """Return the parts of a result as text, and its structured content where no part has any text."""
    texts = [content_text(block) for block in result.content]
    kinds = [getattr(block, "type", type(block).__name__) for block in result.content]
    parts = [
        f"[{kind} left out: only text can be shown]" if text is None else text
        for kind, text in zip(kinds, texts, strict=True)
    ]
    if result.structured_content is not None and not any(text and text.strip() for text in texts):
        wrapped = mcp_types.CallToolResult.model_dump_json(result, include={"structured_content"})
        parts = [*filter(None, parts), wrapped.partition(":")[2][:-1]]
    return "\n".join(parts)


async def _unchecked(name: str, result: mcp_types.CallToolResult) -> None:
    """Take the result as it is; it becomes text."""


async def _bound_answer(response: httpx2.Response) -> None:
    """Break off an answer that is too long to hold, or that would be once it is unpacked."""
    if response.headers.get("content-encoding", "identity") != "identity":
        response.stream = _BoundedStream(response.stream, 0, "the server compresses its answers, although asked not to")
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
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, pydantic.ValidationError):
        wrong = error.errors(include_url=False, include_input=False)[0]
        return cut(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}", 300).text
    return describe_exception(error, 300)
