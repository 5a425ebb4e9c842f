"""What a supervisor or worker has loaded: functions, and perhaps an environment class.

An environment is a class with `reset(**row)`, public methods that are the tools, and optionally
`reward()` (TRL's `get_reward()` is the same), `step_reward()` and `episode_over()`,
all asked after the calls of a turn, `next_user_message(answer)`, which speaks for the user, and
`close()`. Classes written for TRL's `environment_factory` work as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.errors import PluginError
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
_BY_STEP = ("step_reward", "episode_over")
_NOT_TOOLS = ("reset", "reward", "get_reward", *_BY_STEP, "state_key", _SPEAKS, "close")


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment class with its tools."""

    name: str
    factory: Callable[[], Any]
    tools: Mapping[str, LoadedTool]
    reward_method: str | None
    by_step: tuple[str, ...] = ()
    speaks: bool = False


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What the trainer knows of an environment."""

    name: str
    tools: tuple[ToolSpec, ...]
    gives_reward: bool
    by_step: tuple[str, ...] = ()  # what it is asked after each turn
    speaks: bool = False  # it has next_user_message


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """What the trainer knows of everything a supervisor loaded."""

    functions: tuple[ToolSpec, ...] = ()
    environment: EnvironmentSpec | None = None
    import_s: float = 0.0  # how long loading took
    heavy_imports: tuple[str, ...] = ()  # packages that training needs and tools seldom do, if it imported any

    def to_json(self) -> dict[str, Any]:
        environment = self.environment
        return {
            "functions": [spec.to_json() for spec in self.functions],
            "environment": environment
            and {
                "name": environment.name,
                "tools": [spec.to_json() for spec in environment.tools],
                "gives_reward": environment.gives_reward,
                "by_step": list(environment.by_step),
                "speaks": environment.speaks,
            },
            "import_s": self.import_s,
            "heavy_imports": list(self.heavy_imports),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PluginSpec:
        environment = record["environment"]
        return cls(
            functions=tuple(ToolSpec.from_json(item) for item in record["functions"]),
            environment=environment
            and EnvironmentSpec(
                name=environment["name"],
                tools=tuple(ToolSpec.from_json(item) for item in environment["tools"]),
                gives_reward=environment["gives_reward"],
                by_step=tuple(environment["by_step"]),
                speaks=environment["speaks"],
            ),
            import_s=record["import_s"],
            heavy_imports=tuple(record["heavy_imports"]),
        )


@dataclass(frozen=True, slots=True)
class Plugin:
    """Everything loaded in this process."""

    functions: Mapping[str, LoadedTool] = field(default_factory=dict)
    environment: LoadedEnvironment | None = None

    @property
    def spec(self) -> PluginSpec:
        known = None
        if self.environment is not None:
            tools = tuple(tool.spec for tool in self.environment.tools.values())
            gives_reward = self.environment.reward_method is not None
            by_step, speaks = self.environment.by_step, self.environment.speaks
            known = EnvironmentSpec(self.environment.name, tools, gives_reward, by_step, speaks)
        return PluginSpec(tuple(tool.spec for tool in self.functions.values()), known)


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
    if loaded is not None:
        for tool in functions:
            if tool.spec.name in loaded.tools:
                raise PluginError(
                    f"Two tools are named '{tool.spec.name}': one function and one method of the environment {loaded.name}. "
                    "Rename one."
                )
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
    reward = next((key for key in ("reward", "get_reward") if key in methods), None)
    by_step = tuple(key for key in _BY_STEP if key in methods)
    if _SPEAKS in methods:
        _check_speaks(methods[_SPEAKS], where)
    return LoadedEnvironment(
        name, factory, {tool.spec.name: tool for tool in loaded}, reward, by_step, _SPEAKS in methods
    )


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
