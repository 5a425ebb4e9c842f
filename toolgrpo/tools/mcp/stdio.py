"""The pipes to an MCP server that is a process of ours.

The SDK's own client for such servers reads a line of any length, in time that grows with its
square, ends only the processes that stayed in the server's group, and has no ear for what the
server prints. Here a message has a bound, a message that cannot be read is an error of the call
that it answers, what is printed goes into the log and into error messages, and `keeper` ends
every process.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import anyio
import mcp_types
import pydantic
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from toolgrpo.tools.mcp.config_file import McpServerConfig
from toolgrpo.tools.workers.output_log import OutputLog

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_KEEPER = Path(__file__).with_name("keeper.py")
_CHUNK = 1 << 16
_ENDS = 256  # what is kept of either end of a message that is too long: the id of the call stands in one of them
_FLUSH_TIMEOUT_S = 0.5
_EXIT_TIMEOUT_S = 2.0  # for a server to end after its stdin was closed
_KILL_TIMEOUT_S = 7.0  # for the keeper to end all processes: its own limits, and a second
_TAIL_BYTES = 4000
_ID_FIRST = re.compile(rb'\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')

Received: TypeAlias = MemoryObjectReceiveStream[SessionMessage | Exception]
Sent: TypeAlias = MemoryObjectSendStream[SessionMessage]


@dataclass(slots=True)
class ServerOutput:
    """What one server printed beside its messages: into the log, and the last of it kept."""

    log: OutputLog
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _tail: bytes = b""

    def heard(self, text: bytes) -> None:
        self._tail = (self._tail + text)[-_TAIL_BYTES:]
        self.log.record(text)

    def last_words(self, max_lines: int = 5, max_chars: int = 400) -> str:
        """Return the last lines, the end of them if they are long."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-max_lines:])[-max_chars:]


@dataclass(slots=True)
class Keepers:
    """The keepers that live, so that they can be ended without a loop."""

    pids: set[int] = field(default_factory=set)

    def end(self) -> None:
        """End all that are left, and what they keep."""
        _signal_all(self.pids, signal.SIGTERM)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while any(map(_lives, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        _signal_all(self.pids, signal.SIGKILL)
        self.pids.clear()


@asynccontextmanager
async def stdio_transport(
    config: McpServerConfig, output: ServerOutput, keepers: Keepers
) -> AsyncIterator[tuple[Received, Sent]]:
    """Start a server, give the streams of its messages, end it and all that it started."""
    assert config.command is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), config.command, *config.args),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(config.env),
        cwd=config.cwd,
        start_new_session=True,
    )
    keepers.pids.add(process.pid)
    to_client, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, to_server = anyio.create_memory_object_stream[SessionMessage](0)
    reader = asyncio.create_task(_read(process, to_client, output))
    writer = asyncio.create_task(_write(process, to_server, to_client))
    listener = asyncio.create_task(_listen(process, output))
    try:
        yield received, sent
    finally:
        received.close()
        sent.close()  # the writer ends when it has written what it was given
        await asyncio.wait([writer], timeout=_FLUSH_TIMEOUT_S)
        writer.cancel()
        await _end(process)
        keepers.pids.discard(process.pid)
        await asyncio.wait([reader, listener], timeout=_FLUSH_TIMEOUT_S)
        reader.cancel()
        listener.cancel()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the keeper, and with it the server: by closing its stdin, by SIGTERM, by SIGKILL."""
    assert process.stdin is not None
    process.stdin.close()
    exited = asyncio.ensure_future(process.wait())
    await asyncio.wait([exited], timeout=_EXIT_TIMEOUT_S)
    if not exited.done():
        _signal_all({process.pid}, signal.SIGTERM)
        await asyncio.wait([exited], timeout=_KILL_TIMEOUT_S)
    if not exited.done():
        _signal_all({process.pid}, signal.SIGKILL)
        await asyncio.wait([exited], timeout=_FLUSH_TIMEOUT_S)
    exited.cancel()


async def _read(
    process: asyncio.subprocess.Process,
    to_client: MemoryObjectSendStream[SessionMessage | Exception],
    output: ServerOutput,
) -> None:
    """Hand on every message; empty the pipe to its end, also when nobody listens any more."""
    assert process.stdout is not None
    lines = _Lines()
    async with to_client:
        while chunk := await process.stdout.read(_CHUNK):
            for line in lines.fed(chunk):
                if (message := _message(line, output)) is not None:
                    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                        await to_client.send(message)


async def _write(
    process: asyncio.subprocess.Process,
    to_server: MemoryObjectReceiveStream[SessionMessage],
    to_client: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    assert process.stdin is not None
    async with to_server:
        try:
            async for sent in to_server:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            await to_client.aclose()  # the client sees the end of the connection, not requests that hang


async def _listen(process: asyncio.subprocess.Process, output: ServerOutput) -> None:
    assert process.stderr is not None
    try:
        while chunk := await process.stderr.read(_CHUNK):
            output.heard(chunk)
    finally:
        output.ended.set()


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a server's stdout; without its middle if it was too long."""

    text: bytes
    size: int


class _Lines:
    """Lines from chunks, each kept to a bound."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._dropped = 0

    def fed(self, chunk: bytes) -> Iterator[_Line]:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._grow(end)
            yield _Line(bytes(self._line), len(self._line) + self._dropped)
            self._line, self._dropped = bytearray(), 0
        self._grow(rest)

    def _grow(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > MAX_MESSAGE_BYTES:
            self._dropped += len(self._line) - 2 * _ENDS
            self._line[_ENDS:-_ENDS] = b""


def _message(line: _Line, output: ServerOutput) -> SessionMessage | None:
    """Return a line's message, or an error for the call it answers; None if it is neither."""
    if not line.text.strip():
        return None
    if line.size > len(line.text):
        problem = f"the server answered with {line.size:,} bytes; at most {MAX_MESSAGE_BYTES:,} are read"
    else:
        try:
            return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line.text, by_name=False))
        except pydantic.ValidationError as error:
            problem = f"the server's answer cannot be read: {error.errors(include_input=False)[0]['msg'][:200]}"
    answered = _ID_FIRST.match(line.text) or _ID_LAST.search(line.text[-_ENDS:])
    if answered is None:
        output.heard(line.text[:_TAIL_BYTES] + b"\n")
        return None
    error_data = mcp_types.ErrorData(code=mcp_types.PARSE_ERROR, message=problem)
    return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=int(answered[1]), error=error_data))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
