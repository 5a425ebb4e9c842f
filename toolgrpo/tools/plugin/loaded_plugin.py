"""The loaded plugin of a supervisor or worker: functions, and perhaps an environment class.

An environment is a class with `reset(**row)`, public methods that are the tools, and optionally
`HOOKS`: what each is asked, and when, stands in `EpisodeHooks` (`tools/base.py`). Classes written for TRL's `environment_factory` work as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.errors import PluginError
from toolgrpo.tools.base import HOOKS
from toolgrpo.tools.plugin.plugin_file import (
    LoadedTool,
    PluginSource,
    import_source,
    load_functions,
    tools_of,
    unpickle_callables,
)
from toolgrpo.tools.plugin.tool_spec import ToolSpec

_SPEAKS = "next_user_message"
_NOT_TOOLS = ("reset", "state_key", *HOOKS)


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment without its code, for the trainer."""

    name: str
    tools: tuple[ToolSpec, ...]
    hooks: tuple[str, ...] = ()  # which of the optional methods it has


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment class with its tools."""

    spec: EnvironmentSpec
    factory: Callable[[], Any]
    tools: Mapping[str, LoadedTool]


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A loaded plugin without its code, for the trainer; it crosses processes as JSON."""

    functions: tuple[ToolSpec, ...] = ()
    environment: EnvironmentSpec | None = None
    import_s: float = 0.0  # how long loading took
    heavy_imports: tuple[str, ...] = ()  # packages that training needs and tools seldom do, if it imported any

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PluginSpec:
        environment = record["environment"]
        if environment is not None:
            environment = EnvironmentSpec(
                environment["name"], _specs(environment["tools"]), tuple(environment["hooks"])
            )
        return cls(_specs(record["functions"]), environment, record["import_s"], tuple(record["heavy_imports"]))


def _specs(records: Iterable[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    return tuple(ToolSpec(**record) for record in records)


@dataclass(frozen=True, slots=True)
class Plugin:
    """Everything loaded in this process."""

    functions: Mapping[str, LoadedTool] = field(default_factory=dict)
    environment: LoadedEnvironment | None = None

    @property
    def spec(self) -> PluginSpec:
        environment = self.environment.spec if self.environment is not None else None
        return PluginSpec(tuple(tool.spec for tool in self.functions.values()), environment)


def load_plugin(tools: PluginSource | None, environment: PluginSource | None) -> Plugin:
    """Load both sources; a tools file may export ENVIRONMENT, with or without TOOL_FUNCTIONS."""
    functions: Sequence[LoadedTool] = ()
    if tools is not None:
        exports_environment = tools.callables is None and hasattr(import_source(tools), "ENVIRONMENT")
        if exports_environment and environment is None:
            environment = tools
        if not exports_environment or hasattr(import_source(tools), "TOOL_FUNCTIONS"):
            functions = load_functions(tools)
    loaded = None if environment is None else _load_environment(environment)
    return Plugin({tool.spec.name: tool for tool in functions}, loaded)


def _load_environment(source: PluginSource) -> LoadedEnvironment:
    factory = _factory(source)
    name = getattr(factory, "__name__", type(factory).__name__)
    where = f"environment {name} in {source.label}"
    owner = factory if inspect.isclass(factory) else type(factory())
    methods = dict(inspect.getmembers(owner, predicate=inspect.isfunction))
    if "reset" not in methods:
        raise PluginError(
            f"{where} has no reset method. Define `def reset(self, **row)`; it may return a first observation."
        )
    tools = [method for key, method in methods.items() if not key.startswith("_") and key not in _NOT_TOOLS]
    if not tools and _SPEAKS not in methods:
        raise PluginError(
            f"{where} has no public methods besides reset, so the model could do nothing in it. Add one; what "
            f"only asks and judges is rows of questions and a reward function."
        )
    loaded = tools_of(tools, where)
    for tool in loaded:
        if tool.spec.in_process or tool.spec.cache:
            raise PluginError(
                f"{where}: method '{tool.spec.name}' cannot be in_process or cached: "
                "a stateful tool lives with its instance, and its answers change."
            )
    if _SPEAKS in methods:
        _check_speaks(methods[_SPEAKS], where)
    hooks = tuple(key for key in HOOKS if key in methods)
    spec = EnvironmentSpec(name, tuple(tool.spec for tool in loaded), hooks)
    return LoadedEnvironment(spec, factory, {tool.spec.name: tool for tool in loaded})


def _check_speaks(method: Callable[..., Any], where: str) -> None:
    try:
        inspect.signature(method).bind(None, "an answer")
    except TypeError as error:
        raise PluginError(
            f"{where}: {_SPEAKS} is called with what the assistant said last, and cannot be ({error}). Define "
            f"`def {_SPEAKS}(self, answer: str) -> str | None`; None ends the conversation."
        ) from error


def _factory(source: PluginSource) -> Callable[[], Any]:
    if source.callables is not None:
        (factory,) = unpickle_callables(source.callables)
    else:
        attribute = source.attribute or "ENVIRONMENT"
        factory = getattr(import_source(source), attribute, None)
        if factory is None:
            raise PluginError(
                f"No {attribute} found in {source.label}. "
                "Add a line `ENVIRONMENT = YourClass` at its end, or name the class: path.py:YourClass"
            )
    if not callable(factory):
        raise PluginError(f"The environment in {source.label} must be a class, got a {type(factory).__name__}")
    made: Callable[[], Any] = factory
    return made
