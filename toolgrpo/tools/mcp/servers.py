"""Tools of MCP servers, through the official SDK, as a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import mcp_types

from toolgrpo.errors import PluginError
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.mcp.config_file import McpServerConfig
from toolgrpo.tools.mcp.connection import McpConnection, ServerDown
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.tool_reply import Reply

__all__ = ["McpBackend"]


@dataclass(frozen=True, slots=True)
class _Remote:
    """Where a tool lives, and what it is called there."""

    server: str
    name: str


class McpBackend:
    """The tools of all servers of a configuration."""

    def __init__(
        self,
        servers: Sequence[McpServerConfig],
        timeout_s: float,
        *,
        connect_timeout_s: float,
        max_result_chars: int,
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._max_result_chars = max_result_chars
        self._servers = {server.name: server for server in servers}
        self._remote: dict[str, _Remote] = {}
        self._specs: list[ToolSpec] = []
        self._thread = LoopThread("toolgrpo-mcp")
        self._closed = False
        self._shared = {server.name: self._connection(server) for server in servers}
        try:
            self._thread.submit(self._open()).result()
        except BaseException:
            self.close()
            raise

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._specs

    def session(self, row: Mapping[str, Any]) -> McpSession:
        own = {name: self._connection(server) for name, server in self._servers.items() if server.per_trajectory}
        return McpSession(self._thread, self._remote, {**self._shared, **own}, list(own.values()), self._timeout_s)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._close()).result(timeout=30)
            self._thread.close()

    def _connection(self, server: McpServerConfig) -> McpConnection:
        return McpConnection(server, self._connect_timeout_s, self._max_result_chars)

    async def _open(self) -> None:
        """Connect to every server at once and learn its tools."""
        listed = await asyncio.gather(*(self._list(name) for name in self._servers))
        for (name, server), tools in zip(self._servers.items(), listed, strict=True):
            known = {tool.name for tool in tools}
            for wanted in server.tools or ():
                if wanted not in known:
                    raise PluginError(
                        f"the MCP server '{name}' has no tool '{wanted}'; it has {', '.join(sorted(known))}"
                    )
            for tool in tools:
                if server.tools is None or tool.name in server.tools:
                    self._add(server, tool)
            if server.per_trajectory:
                await self._shared[name].close()

    async def _list(self, name: str) -> list[mcp_types.Tool]:
        try:
            return await self._shared[name].list_tools()
        except ServerDown as error:
            raise PluginError(f"{error}. Check its command or URL in the MCP configuration.") from error

    def _add(self, server: McpServerConfig, tool: mcp_types.Tool) -> None:
        name = server.prefix + tool.name
        if name in self._remote:
            raise PluginError(
                f"two MCP servers have a tool named '{name}': '{self._remote[name].server}' and '{server.name}'. "
                'Give one of them a "prefix" in the MCP configuration.'
            )
        parameters = {key: value for key, value in tool.input_schema.items() if key not in ("$schema", "title")}
        if "properties" not in parameters:
            parameters = {**parameters, "properties": {}, "additionalProperties": True}
        described = {"name": name, "description": tool.description or tool.title or name, "parameters": parameters}
        self._remote[name] = _Remote(server.name, tool.name)
        self._specs.append(ToolSpec(name, {"type": "function", "function": described}, is_async=True))

    async def _close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._shared.values()))


class McpSession:
    """One episode's connections: the run's, or its own."""

    observation = None

    def __init__(
        self,
        thread: LoopThread,
        remote: Mapping[str, _Remote],
        connections: Mapping[str, McpConnection],
        own: Sequence[McpConnection],
        timeout_s: float,
    ) -> None:
        self._thread = thread
        self._remote = remote
        self._connections = connections
        self._own = own
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Connections open with the first call."""

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply:
        remote = self._remote[spec.name]
        work = self._connections[remote.server].call(remote.name, arguments, spec.timeout_s or self._timeout_s)
        future: Future[Reply] = self._thread.submit(work)
        return await asyncio.wrap_future(future)

    async def reward(self) -> float | None:
        return None

    async def close(self) -> None:
        for connection in self._own:
            await asyncio.wrap_future(self._thread.submit(connection.close()))
