"""`mcp.json`: the `mcpServers` form of desktop clients, with three keys of our own per server.

    {"mcpServers": {
        "time": {"command": "mcp-server-time", "args": ["--local-timezone=UTC"], "env": {}},
        "web": {"url": "http://localhost:8000/mcp", "headers": {"Authorization": "..."}, "session": "trajectory"}}}

Ours: `session` ("run", the default: one connection that all episodes share; "trajectory": one per
episode), `prefix` (put before every tool name) and `tools` (only these). Keys that only desktop
applications need are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolgrpo.errors import ConfigError
from toolgrpo.missing_files import no_mcp_config


@dataclass(frozen=True, slots=True)
class McpServerConfig:
    """One server: a command to start, or a URL to talk to."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    per_trajectory: bool = False
    prefix: str = ""
    tools: tuple[str, ...] | None = None


def read_mcp_config(config: str | Path | Mapping[str, Any]) -> list[McpServerConfig]:
    """Read the servers of a file or of its contents."""
    if isinstance(config, Mapping):
        label, content = "the MCP configuration", dict(config)
    else:
        label = str(config)
        try:
            content = json.loads(Path(config).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(no_mcp_config(Path(config))) from None
        except OSError as error:
            raise ConfigError(f"the MCP configuration {label} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the MCP configuration {label} is not JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{label} must have the form {{"mcpServers": {{"name": {{"command": ...}}}}}}')
    return [_server(name, entry, label) for name, entry in servers.items() if not _disabled(entry)]


def _disabled(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("disabled") is True


def _server(name: str, entry: object, label: str) -> McpServerConfig:
    where = f"{label}: server '{name}'"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object, got {entry!r:.80}")
    command, url = entry.get("command"), entry.get("url")
    if (command is None) == (url is None):
        raise ConfigError(f'{where} needs either a "command" to start or a "url" to talk to')
    if entry.get("type") == "sse":
        raise ConfigError(f"{where} asks for the old SSE transport; only stdio and streamable HTTP are supported")
    session = entry.get("session", "run")
    if session not in ("run", "trajectory"):
        raise ConfigError(f'{where}: "session" must be "run" or "trajectory", got {session!r}')
    tools = entry.get("tools")
    return McpServerConfig(
        name=name,
        command=_text(command, where, "command"),
        args=tuple(str(arg) for arg in _list(entry.get("args", []), where, "args")),
        env=_texts(entry.get("env", {}), where, "env"),
        cwd=_text(entry.get("cwd"), where, "cwd"),
        url=_text(url, where, "url"),
        headers=_texts(entry.get("headers", {}), where, "headers"),
        per_trajectory=session == "trajectory",
        prefix=_text(entry.get("prefix"), where, "prefix") or "",
        tools=None if tools is None else tuple(str(tool) for tool in _list(tools, where, "tools")),
    )


def _text(value: object, where: str, key: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f'{where}: "{key}" must be a string, got {value!r:.80}')
    return value


def _list(value: object, where: str, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f'{where}: "{key}" must be a list, got {value!r:.80}')
    return value


def _texts(value: object, where: str, key: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: "{key}" must be an object of strings, got {value!r:.80}')
    return {str(name): str(text) for name, text in value.items()}
