"""From a plugin file, a module or callables to tools that can be called.

Runs where the tools will run (the supervisor and the workers; the trainer's process only for tools
that ask for it), so a plugin file whose import crashes or hangs does not take the trainer with it.

Every error names the file and what to do.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from toolgrpo.errors import PluginError
from toolgrpo.plugin_files import import_failed, import_file, user_traceback
from toolgrpo.processes.wire import unpack_objects
from toolgrpo.tools.plugin.argument_types import ArgumentConverter
from toolgrpo.tools.plugin.schema import function_schema, wrap_explicit_schema
from toolgrpo.tools.plugin.tool_spec import ToolSpec, options_of

_EXAMPLE = "TOOL_FUNCTIONS = [my_function, another_function]"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Where tools come from. Exactly one of the three is given."""

    path: str | None = None
    module: str | None = None
    callables: str | None = None  # base64 of a cloudpickle of a list of callables
    attribute: str | None = None  # of an environment: the name of its class
    secrets: Sequence[str] = ()  # of callables: what the modules that hold them ask for

    @property
    def label(self) -> str:
        return self.path or self.module or "the given callables"


@dataclass(frozen=True, slots=True)
class LoadedTool:
    """A tool with its code."""

    spec: ToolSpec
    function: Callable[..., Any]
    converter: ArgumentConverter

    def call(self, arguments: Mapping[str, Any], instance: object = None) -> Any:
        """Call it, on an instance where it is a method; a coroutine function gives its coroutine."""
        function = self.function if instance is None else getattr(instance, self.function.__name__)
        return self.converter.call(function, arguments)


def load_functions(source: PluginSource) -> list[LoadedTool]:
    """Load all tools of a source, in its order."""
    if source.callables is not None:
        return tools_of(unpickle_callables(source.callables), source.label)
    return tools_of(_exported(import_source(source), source.label), source.label)


def import_source(source: PluginSource) -> ModuleType:
    """Import the module of a path or of a module name."""
    if source.path is not None:
        return import_file(Path(source.path), needs_annotations=True)
    assert source.module is not None
    search_beside_the_command()
    try:
        return importlib.import_module(source.module)
    except ModuleNotFoundError as error:
        if error.name is not None and (source.module == error.name or source.module.startswith(error.name + ".")):
            raise PluginError(
                f"No module named {source.module!r}. It must be importable from here: check the spelling, "
                "install it, or give the file's path instead."
            ) from error
        raise PluginError(import_failed(source.module, error)) from error
    except BaseException as error:  # a plugin may raise anything, SystemExit included
        raise PluginError(import_failed(source.module, error)) from error


def search_beside_the_command() -> None:
    """Let modules in the working directory be found, as `python -m` would find them."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def tools_of(functions: Iterable[Any], label: str) -> list[LoadedTool]:
    """Return the tools of callables, each checked, no two of one name."""
    loaded: list[LoadedTool] = []
    seen: dict[str, str] = {}
    for function in functions:
        tool = _load_one(function, label)
        place = _place(function, label)
        if tool.spec.name in seen:
            raise PluginError(
                f"Two tools are named '{tool.spec.name}': {seen[tool.spec.name]} and {place}. "
                "Rename one, or give it another name with @tool(name=...)."
            )
        seen[tool.spec.name] = place
        loaded.append(tool)
    return loaded


def _load_one(function: Any, label: str) -> LoadedTool:
    options = options_of(function)
    name = options.name or getattr(function, "__name__", None) or type(function).__name__
    if not name.replace("-", "_").isidentifier():
        raise PluginError(
            f"{label}: a tool named {name!r} cannot be called by a model. "
            "Define it with `def` and a name, or name it with @tool(name=...)."
        )
    where = f"{_place(function, label)}: tool '{name}'"
    if options.schema is not None:
        schema = wrap_explicit_schema(options.schema, function, name, where)
        converter = ArgumentConverter(function, where, typed=False)
    else:
        schema = function_schema(function, name, where)
        converter = ArgumentConverter(function, where, typed=True)
    target = function if inspect.isroutine(function) else type(function).__call__
    known = {"name": schema["function"]["name"], "schema": schema, "closed": options.schema is None}
    spec = ToolSpec(**vars(options) | known, is_async=inspect.iscoroutinefunction(target))
    return LoadedTool(spec, function, converter)


def _exported(module: ModuleType, label: str) -> list[Any]:
    missing = object()
    functions = getattr(module, "TOOL_FUNCTIONS", missing)
    if functions is missing:
        raise PluginError(f"No TOOL_FUNCTIONS found in {label}. Add a line at its end: {_EXAMPLE}")
    if not isinstance(functions, list | tuple):
        raise PluginError(
            f"TOOL_FUNCTIONS in {label} must be a list of functions, got a {type(functions).__name__}. "
            f"Write it like this: {_EXAMPLE}"
        )
    if not functions:
        raise PluginError(f"TOOL_FUNCTIONS in {label} is empty. Put at least one function into it: {_EXAMPLE}")
    for index, member in enumerate(functions):
        if not callable(member):
            raise PluginError(
                f"TOOL_FUNCTIONS[{index}] in {label} is not callable: it is {member!r:.80} (a {type(member).__name__}). "
                "List the functions themselves, without quotes and without calling them."
            )
    return list(functions)


def unpickle_callables(blob: str) -> list[Any]:
    """Unpickle the callables that the trainer sent."""
    try:
        functions: list[Any] = unpack_objects(blob)
    except BaseException as error:  # unpickling imports the user's modules
        raise PluginError("the given callables cannot be loaded in a tool worker:\n" + user_traceback(error)) from error
    return functions


def _place(function: Any, label: str) -> str:
    """Return where a function stands, as in `file.py:12`, or what else is known."""
    code = getattr(inspect.unwrap(function) if inspect.isroutine(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else label
