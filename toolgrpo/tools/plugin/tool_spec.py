"""`@tool(...)`, what a tool may ask for; and `ToolSpec`, what is known of a tool without its code.

A plain function needs no decorator. The decorator changes nothing about how the function is called;
it hangs one frozen `ToolOptions` on it, which the loader reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toolgrpo.errors import PluginError

_ATTRIBUTE = "__toolgrpo_options__"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ToolOptions:
    """Everything a tool may ask for; the defaults are those of a plain function."""

    name: str | None = None  # default: the function's own name
    timeout_s: float | None = None  # default: the run's --tool_timeout
    cache: bool | None = None  # None: as the run says; True: pure; False: never
    isolate: bool = False  # every call alone in a fresh process, never run twice
    keep_processes: bool = False  # processes that a call starts may outlive it
    in_process: bool = False  # runs in the trainer's process, where nothing contains it
    ends_episode: bool = False  # a good call of this tool ends the episode
    schema: Mapping[str, Any] | None = None  # an explicit JSON schema instead of the signature's
    unchecked: bool = False  # its arguments are not compared with its schema

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise PluginError(f"@tool(timeout=...) must be a positive number of seconds, got {self.timeout_s!r}")
        if self.isolate and self.keep_processes:
            raise PluginError("@tool(isolate=True, keep_processes=True) contradict each other: choose one")
        if self.in_process and self.isolate:
            raise PluginError("@tool(in_process=True, isolate=True) contradict each other: choose one")
        if self.unchecked and self.schema is None:
            raise PluginError("@tool(unchecked=True) needs a schema=...; what a signature says is always checked")


@dataclass(frozen=True)
class ToolSpec(ToolOptions):
    """One tool without its code, as the trainer knows it: the value that crosses processes as JSON."""

    name: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)  # {"type": "function", "function": {...}}
    is_async: bool = False
    # no object in the arguments takes keys that the schema does not name: its type would drop them
    closed: bool = False
    examples: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # of its parameters: its file's EXAMPLES
    literals: Sequence[Any] = ()  # short values in its code, and in the tables that it reads
    read_only: bool | None = None  # as an MCP server marks it; None: a function, of whose author we ask nothing

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        parameters: Mapping[str, Any] = self.schema["function"]["parameters"]
        return parameters

    @property
    def undescribed(self) -> list[str]:
        """The parameters that the schema says nothing about but their type."""
        properties: Mapping[str, Any] = self.parameters.get("properties", {})
        return [name for name, schema in properties.items() if not schema.get("description")]


def tool(
    *,
    name: str | None = None,
    timeout: float | None = None,
    cache: bool | None = None,
    isolate: bool = False,
    keep_processes: bool = False,
    in_process: bool = False,
    ends_episode: bool = False,
    schema: Mapping[str, Any] | None = None,
    unchecked: bool = False,
) -> Callable[[F], F]:
    """Say more about a tool: `@tool(timeout=5, cache=True)`.

    Args:
        name: The name the model sees, if it is not the function's.
        timeout: Seconds one call may take.
        cache: True for a pure function: same arguments, same answer, asked once per run.
        isolate: Run every call alone in a process of its own. Costs some milliseconds and promises
            that no call is ever run twice and that no other call can disturb it. For tools with
            effects outside.
        keep_processes: Let processes that a call starts live on, as long as the worker, instead of
            killing them with the call. For tools that start a helper once and ask it again.
        in_process: Run in the trainer's own process, for tools that need its objects. Nothing
            contains such a tool.
        ends_episode: A good call ends the episode.
        schema: An explicit JSON schema: the parameters object, or the whole OpenAI function form.
        unchecked: The arguments reach the tool as the model wrote them, whatever its `schema` says,
            and nothing is made to fit. For tools that judge them themselves.
    """
    options = ToolOptions(
        name=name,
        timeout_s=timeout,
        cache=cache,
        isolate=isolate,
        keep_processes=keep_processes,
        in_process=in_process,
        ends_episode=ends_episode,
        schema=schema,
        unchecked=unchecked,
    )

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, options)
        return function

    return mark


def options_of(function: Callable[..., Any]) -> ToolOptions:
    """Return what the function asked for through `@tool`, or the defaults."""
    while isinstance(function, functools.partial) and not hasattr(function, _ATTRIBUTE):
        function = function.func
    options = getattr(function, _ATTRIBUTE, None)
    return options if isinstance(options, ToolOptions) else ToolOptions()
