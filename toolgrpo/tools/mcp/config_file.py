"""`mcp.json`: the `mcpServers` form of desktop clients, with three keys of our own per server.

    {"mcpServers": {
        "time": {"command": "mcp-server-time", "args": ["--local-timezone=UTC"], "env": {}},
        "web": {"url": "http://localhost:8000/mcp", "headers": {"Authorization": "..."}, "session": "trajectory"}}}

`${VAR}` and `${VAR:-default}` in a text are replaced by variables of the environment.

Ours: `session` ("run", the default: one connection that all episodes share; "trajectory": one per
episode), `prefix` (put before every tool name) and `tools` (only these). Keys that only desktop
applications need are passed over, but for those that name tools (`includeTools`), which would be
offered or left out unasked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toolgrpo.errors import ConfigError
from toolgrpo.support.settings_files import BadSettings, read_json
from toolgrpo.support.shipped_files import located, nearest, no_mcp_config

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


class McpServerConfig(BaseModel):
    """One server: a command to start, or a URL to talk to."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: str
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    session: Literal["run", "trajectory"] = "run"
    prefix: str = ""
    tools: list[str] | None = None


def read_mcp_config(config: str | Path | Mapping[str, Any]) -> list[McpServerConfig]:
    """Read the servers of a file or of its contents."""
    if isinstance(config, Mapping):
        label, content = "the MCP configuration", dict(config)
    else:
        label = str(config)
        try:
            content = read_json(located(config))
        except FileNotFoundError:
            raise ConfigError(no_mcp_config(Path(config))) from None
        except OSError as error:
            raise ConfigError(f"the MCP configuration {label} cannot be read: {error}") from error
        except BadSettings as error:
            raise ConfigError(f"the MCP configuration {label} {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{label} must have the form {{"mcpServers": {{"name": {{"command": ...}}}}}}')
    used = {name: entry for name, entry in servers.items() if not (isinstance(entry, dict) and _is_off(entry))}
    if not used:
        raise ConfigError(f"{label} disables all its servers ({', '.join(servers)}); enable one, or leave it out")
    return [_server(name, entry, label) for name, entry in used.items()]


def _expanded(value: Any, where: str) -> Any:
    """Return a value with the variables in its texts replaced."""
    if isinstance(value, Mapping):
        return {key: _expanded(one, where) for key, one in value.items()}
    if isinstance(value, list):
        return [_expanded(one, where) for one in value]
    if not isinstance(value, str):
        return value

    def variable(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name not in os.environ and default is None:
            raise ConfigError(
                f"{where} reads the variable {name}, which is not set; set it, or write ${{{name}:-default}}"
            )
        return os.environ.get(name) or default or ""

    return _VARIABLE.sub(variable, value)


def _is_off(entry: Mapping[str, Any]) -> bool:
    """Return whether desktop applications pass a server over, in either of their words."""
    return bool(entry.get("disabled")) or entry.get("enabled") is False


def _server(name: str, entry: object, label: str) -> McpServerConfig:
    where = f"{label}: server '{name}'"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be an object, got {entry!r:.80}")
    command, url = entry.get("command"), entry.get("url")
    if (command is None) == (url is None):
        raise ConfigError(f'{where} needs either a "command" to start or a "url" to connect to')
    if entry.get("type") == "sse":
        raise ConfigError(f"{where} asks for the old SSE transport; only stdio and streamable HTTP are supported")
    for key in map(str, entry.keys() - McpServerConfig.model_fields.keys()):
        meant = ["tools"] if key.casefold().endswith("tools") else nearest(key, McpServerConfig.model_fields, alike=0.8)
        if meant:
            raise ConfigError(f'{where} has the key "{key}", which is not known; the nearest is "{meant[0]}"')
    try:
        return McpServerConfig(**_expanded(entry, where) | {"name": name})
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f'{where}: "{key}": {wrong["msg"]}, got {wrong["input"]!r:.80}') from error
