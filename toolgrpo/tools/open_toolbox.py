"""`load_tools`: from what a user gives to a running `Toolbox`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from toolgrpo.errors import ConfigError
from toolgrpo.tools.backends import EnvironmentBackend, FunctionBackend, InProcess, ToolBackend
from toolgrpo.tools.base import TOOL_TIMEOUT_S, TOOL_WORKERS, ToolProvider
from toolgrpo.tools.mcp.config_file import read_mcp_config
from toolgrpo.tools.plugin.plugin_file import LoadedTool, PluginSource, load_functions, tools_of
from toolgrpo.tools.plugin.tool_source import environment_source, source_of
from toolgrpo.tools.plugin.tool_spec import ToolSpec, options_of
from toolgrpo.tools.toolbox import Toolbox
from toolgrpo.tools.workers.output_log import OutputLog
from toolgrpo.tools.workers.pool import WorkerPool
from toolgrpo.tools.workers.tool_worker import PoolOptions

_SLOW_S = 5.0
ToolSource = str | Path | ModuleType | Sequence[Callable[..., Any]]


def open_tools(
    tools: ToolSource | ToolProvider | None,
    *,
    environment: str | Path | Callable[..., Any] | None = None,
    tool_timeout_s: float = TOOL_TIMEOUT_S,
    **options: Any,
) -> ToolProvider | None:
    """Return the tools that a user names, loaded where they are not; None where none are named.

    The one door for a trainer's arguments and for flags; `options` are those of `load_tools`.
    """
    if isinstance(tools, ToolProvider):
        if environment is not None:
            raise ConfigError(
                "an environment_factory and a loaded toolbox are both given; use load_tools(..., environment=...) for both"
            )
        timeout_s = getattr(tools, "timeout_s", tool_timeout_s)
        if tool_timeout_s not in (TOOL_TIMEOUT_S, timeout_s):
            raise ConfigError(
                f"tool_timeout is {tool_timeout_s:g}, but the toolbox that was given was loaded with "
                f"{timeout_s:g} s for a call; use load_tools(..., tool_timeout_s={tool_timeout_s:g}), or leave "
                f"tool_timeout out"
            )
        return tools
    if tools is None and environment is None and options.get("mcp_config") is None:
        return None
    tools = tools if environment is None else tools or None  # TRL's own jobs give an empty list beside a factory
    return load_tools(tools, environment=environment, tool_timeout_s=tool_timeout_s, **options)


def load_tools(
    spec: ToolSource | None = None,
    *,
    environment: str | Path | Callable[..., Any] | None = None,
    mcp_config: str | Path | Mapping[str, Any] | None = None,
    tool_timeout_s: float = TOOL_TIMEOUT_S,
    cache_tools: bool = False,
    workers: int = TOOL_WORKERS,
    threads_per_worker: int = 64,
    memory_mb: int = 4096,
    max_result_chars: int = 1_000_000,
    log_path: Path | str | None = None,
    load_timeout_s: float = 120.0,
) -> Toolbox:
    """Load tools and start their workers.

    Args:
        spec: A plugin file, a module or its name, or a list of functions. A file may export an
            ENVIRONMENT instead.
        environment: A class with state: `path.py:Class`, `module:Class`, or the class itself.
        mcp_config: An `mcp.json`, or its contents.
        tool_timeout_s: Seconds that one call may take, unless its tool says otherwise.
        cache_tools: Treat every function as pure unless it says otherwise.
        workers: Worker processes.
        threads_per_worker: Calls that one worker runs at the same time.
        memory_mb: Address space of each worker; 0 for no limit.
        max_result_chars: Longer results lose their middle before they travel, so that memory lasts.
            What a model sees of a result is decided in tokens, by
            `EpisodeLimits.max_tool_response_tokens`.
        log_path: Where what tools and MCP servers print goes; without it, to the logger
            `toolgrpo.tools.output`.
        load_timeout_s: Seconds that importing the plugin, or connecting to an MCP server, may take.
    """
    _check_positive(tool_timeout_s=tool_timeout_s, workers=workers, load_timeout_s=load_timeout_s)
    _check_positive(threads_per_worker=threads_per_worker, max_result_chars=max_result_chars)
    if memory_mb < 0:
        raise ConfigError(f"memory_mb must be a number of megabytes, or 0 for no limit; got {memory_mb!r}")
    chosen = _choose(spec)
    stateful = None if environment is None else environment_source(environment)
    log_file = None if log_path is None else Path(log_path)
    order, held = chosen.order, chosen.held
    slow: str | None = None
    with ExitStack() as undo:
        backends: list[ToolBackend] = []
        if chosen.source is not None or stateful is not None:
            hello = {"tools": chosen.source and asdict(chosen.source), "environment": stateful and asdict(stateful)}
            options = PoolOptions(workers, threads_per_worker, memory_mb, max_result_chars, load_timeout_s)
            pool = WorkerPool(hello, options, OutputLog(log_file))
            undo.callback(pool.close)
            label = ", ".join(one.label for one in (chosen.source, stateful) if one is not None)
            slow = slow_import(label, pool.spec.import_s, pool.spec.heavy_imports)
            order = order or [known.name for known in pool.spec.functions]
            held = held or _held_here(chosen.source, pool)
            outside = [known for known in pool.spec.functions if not known.in_process]
            backends.append(FunctionBackend(pool, outside, tool_timeout_s, cache_all=cache_tools))
            if pool.spec.environment is not None:
                backends.append(EnvironmentBackend(pool, pool.spec.environment, tool_timeout_s))
        if held:
            here = InProcess(held, max_result_chars)
            undo.callback(here.close)
            specs = [tool.spec for tool in held]
            backends.append(FunctionBackend(here, specs, tool_timeout_s, cache_all=cache_tools))
        notices = [*_undescribed(spec for backend in backends for spec in backend.specs), *([slow] if slow else ())]
        if mcp_config is not None:
            servers = read_mcp_config(mcp_config)
            if find_spec("mcp") is None:
                raise ConfigError(
                    "MCP servers need the package mcp, which is not installed: pip install 'toolgrpo[mcp]'"
                )
            from toolgrpo.tools.mcp.servers import McpBackend  # the SDK takes a second to import

            remote = McpBackend(servers, tool_timeout_s, load_timeout_s, max_result_chars, OutputLog(log_file))
            undo.callback(remote.close)
            backends.append(remote)
        toolbox = Toolbox(backends, order, timeout_s=tool_timeout_s, notices=notices)
        undo.pop_all()
    for notice in toolbox.notices:
        warnings.warn(notice, stacklevel=2)
    return toolbox


def _undescribed(specs: Iterable[ToolSpec]) -> list[str]:
    """Say which parameters the model is told nothing about.

    What the schemas of MCP servers leave out is theirs to say.
    """
    found = [f"{spec.name}({', '.join(spec.undescribed)})" for spec in specs if spec.undescribed]
    if not found:
        return []
    return [
        f"the model will see only the name and the type of these parameters: {', '.join(found)}. A line for each in "
        f"an `Args:` section of the docstring would tell it what they mean"
    ]


def _held_here(source: PluginSource | None, pool: WorkerPool) -> list[LoadedTool]:
    """Load the tools of a file or module that asked for this process.

    Only for them it is imported here.
    """
    if source is None or not any(known.in_process for known in pool.spec.functions):
        return []
    return [tool for tool in load_functions(source) if tool.spec.in_process]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The parts of a `spec`: a source for the workers, tools held here, and the order of their names
    if it is known.
    """

    source: PluginSource | None
    held: list[LoadedTool]
    order: list[str]


def _choose(spec: ToolSource | None) -> _Chosen:
    if spec is None:
        return _Chosen(None, [], [])
    if not isinstance(spec, list | tuple) or not any(options_of(member).in_process for member in spec):
        return _Chosen(source_of(spec), [], [])
    loaded = tools_of(spec, "the given callables")  # their code is here already, and names must be told apart
    outside = [tool.function for tool in loaded if not tool.spec.in_process]
    return _Chosen(
        source=source_of(outside) if outside else None,
        held=[tool for tool in loaded if tool.spec.in_process],
        order=[tool.spec.name for tool in loaded],
    )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} must be positive, got {value!r}")


def slow_import(label: str, seconds: float, heavy: tuple[str, ...]) -> str | None:
    """Return what to say of a plugin that took long to load in the tool workers."""
    if seconds < _SLOW_S:
        return None
    because = f" (it imports {', '.join(sorted(heavy))})" if heavy else ""
    return (
        f"the tool workers took {seconds:.0f} s to import {label}{because}, and so will each that is started again; "
        f"keep tools in their own file, which imports only what they need"
    )
