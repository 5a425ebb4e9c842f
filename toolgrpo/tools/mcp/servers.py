"""Tools of MCP servers, through the official SDK, as a backend."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import mcp_types

from confined_python.processes.linux import kill_marked
from toolgrpo.errors import PluginError
from toolgrpo.tools.arguments import ArgumentChecker
from toolgrpo.tools.backends import BackendSession
from toolgrpo.tools.base import Reply
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.mcp.config_file import McpServerConfig
from toolgrpo.tools.mcp.connection import ConnectionOptions, McpConnection
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.render import describe_exception
from toolgrpo.tools.workers.output_log import OutputLog

_CLOSE_TIMEOUT_S = 40.0  # all servers at once; each has limits of its own that are shorter
_MAX_DESCRIPTION_CHARS = 20_000
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_LEAVE_OUT = 'Name the tools you want, without this one, under "tools" in the MCP configuration.'


class McpBackend:
    """The tools of all servers of a configuration."""

    def __init__(
        self,
        servers: Sequence[McpServerConfig],
        timeout_s: float,
        connect_timeout_s: float,
        max_result_chars: int,
        log: OutputLog,
    ) -> None:
        self._timeout_s = timeout_s
        self._log = log
        self._options = ConnectionOptions(connect_timeout_s, max_result_chars, log, f"TOOLGRPO_MCP_{uuid.uuid4().hex}")
        self._servers = {server.name: server for server in servers}
        self._remote: dict[str, tuple[str, str]] = {}  # a tool's server, and its name there
        self.specs: list[ToolSpec] = []
        self._thread = LoopThread("toolgrpo-mcp")
        self._of_sessions: set[McpConnection] = set()  # of episodes that are under way
        self._closed = False
        self._shared = {server.name: McpConnection(server, self._options) for server in servers}
        try:
            self._thread.submit(self._open()).result()
        except BaseException:
            self.close()
            raise

    def session(self, row: Mapping[str, Any]) -> McpSession:
        own = {
            name: McpConnection(server, self._options)
            for name, server in self._servers.items()
            if server.session == "trajectory"
        }
        self._of_sessions.update(own.values())
        return McpSession(self, own)

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any], own: Mapping[str, McpConnection]) -> Reply:
        """Ask a tool over the connection of the episode, or that of the run."""
        server, name = self._remote[spec.name]
        connection = own.get(server) or self._shared[server]
        work = connection.call(name, arguments, spec.timeout_s or self._timeout_s)
        started = time.monotonic()
        reply = await asyncio.wrap_future(self._thread.submit(work))
        return reply.timed(started, time.monotonic())

    async def leave(self, connections: Iterable[McpConnection]) -> None:
        """Close the connections of an episode, unless the backend is closed, and they with it."""
        for connection in connections:
            if not self._closed:
                await asyncio.wrap_future(self._thread.submit(connection.close()))
            self._of_sessions.discard(connection)

    def close(self) -> None:
        """Leave all servers, and end those that are ours. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with suppress(Exception):  # however leaving them fails, they are ended below
                self._thread.submit(self._close()).result(timeout=_CLOSE_TIMEOUT_S)
            self._thread.close()
            kill_marked(self._options.mark)
            self._log.close()

    async def _open(self) -> None:
        """Connect to every server at once and learn its tools."""
        listed = await asyncio.gather(*(self._shared[name].list_tools() for name in self._servers))
        for (name, server), tools in zip(self._servers.items(), listed, strict=True):
            known = {tool.name for tool in tools}
            for wanted in server.tools or ():
                if wanted not in known:
                    raise PluginError(
                        f"the MCP server '{name}' has no tool '{wanted}'; it has {', '.join(sorted(known))[:1000]}"
                    )
            used = [tool for tool in tools if server.tools is None or tool.name in server.tools]
            if not used:
                why = 'the list under "tools" is empty' if tools else "it lists none"
                raise PluginError(f"the MCP server '{name}' gives no tools: {why}. Mend that, or leave the server out.")
            for tool in used:
                self._add(server, tool)
            if server.session == "trajectory":
                await self._shared[name].close()

    def _add(self, server: McpServerConfig, tool: mcp_types.Tool) -> None:
        name = server.prefix + tool.name
        where = f"the MCP server '{server.name}': tool '{name[:128]}'"
        self._check_name(server, name, where)
        description = tool.description or tool.title or name
        if len(description) > _MAX_DESCRIPTION_CHARS:
            raise PluginError(
                f"{where}: its description has {len(description):,} characters, and every prompt would hold them; at most "
                f"{_MAX_DESCRIPTION_CHARS:,}. {_LEAVE_OUT}"
            )
        parameters = {key: value for key, value in tool.input_schema.items() if key not in ("$schema", "title")}
        if "properties" not in parameters:
            is_open = parameters.get("additionalProperties", True)
            parameters = {**parameters, "properties": {}, "additionalProperties": is_open}
        try:
            ArgumentChecker(name, parameters, where)
        except PluginError as error:
            raise PluginError(f"{error} {_LEAVE_OUT}") from error
        except Exception as error:  # a schema can hold anything, and must not end the run with a bare error
            raise PluginError(
                f"{where}: its schema cannot be used ({describe_exception(error, 300)}) {_LEAVE_OUT}"
            ) from error
        described = {"name": name, "description": description, "parameters": parameters}
        self._remote[name] = server.name, tool.name
        schema = {"type": "function", "function": described}
        read_only = tool.annotations is not None and tool.annotations.read_only_hint is True
        self.specs.append(ToolSpec(name=name, schema=schema, read_only=read_only))

    def _check_name(self, server: McpServerConfig, name: str, where: str) -> None:
        if not _NAME.fullmatch(name):
            raise PluginError(
                f"the MCP server '{server.name}' has a tool named {name[:128]!r}. A model must be able to write a name: 1 to "
                f"128 letters, digits and _ . : / - are allowed. {_LEAVE_OUT}"
            )
        if name not in self._remote:
            return
        if (other := self._remote[name][0]) == server.name:
            raise PluginError(f"{where}: it is listed twice")
        raise PluginError(
            f"two MCP servers have a tool named '{name}': '{other}' and '{server.name}'. "
            'Give one of them a "prefix" in the MCP configuration.'
        )

    async def _close(self) -> None:
        connections = {*self._shared.values(), *self._of_sessions}
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)


class McpSession(BackendSession):
    """One episode's connections: the run's, or its own; they open with the first call."""

    def __init__(self, backend: McpBackend, own: Mapping[str, McpConnection]) -> None:
        self._backend = backend
        self._own = own

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply:
        return await self._backend.call(spec, arguments, self._own)

    async def leave(self) -> None:
        await self._backend.leave(self._own.values())
