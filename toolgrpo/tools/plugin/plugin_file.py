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

import pydantic

from toolgrpo.errors import PluginError
from toolgrpo.plugin_files import import_failed, import_file, user_traceback
from toolgrpo.processes.wire import unpack_objects
from toolgrpo.tools.plugin.schema import function_schema, type_hints, wrap_explicit_schema
from toolgrpo.tools.plugin.tool_spec import ToolSpec, options_of
from toolgrpo.tools.render import BadArguments

_PLAIN = (str, bool, Any)  # JSON gives these as they are
_EXAMPLE = "TOOL_FUNCTIONS = [my_function, another_function]"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """The source of tools: exactly one of path, module and callables."""

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
    positional: Sequence[str]  # parameters that are given without a name
    adapters: Mapping[str, pydantic.TypeAdapter[Any]]  # of the parameters whose values JSON does not give as they are

    def call(self, arguments: Mapping[str, Any], instance: object = None) -> Any:
        """Call it with JSON arguments, on `instance` if it is a method; a coroutine function gives its coroutine.

        The trainer has checked the arguments against the schema. Here pydantic makes what the annotations
        say (an Enum member, a dataclass, a date), and BadArguments says what only the types can check.
        """
        values = dict(arguments)
        problems: list[str] = []
        for name, adapter in self.adapters.items():
            if name in values:
                try:
                    values[name] = _integers_kept(values[name], adapter.validate_python(values[name]))
                except pydantic.ValidationError as error:
                    problems += [_problem(name, item) for item in error.errors(include_url=False)[:3]]
        if problems:
            raise BadArguments("; ".join(problems))
        function = self.function if instance is None else getattr(instance, self.function.__name__)
        positional = [values.pop(name) for name in self.positional if name in values]
        return function(*positional, **values)


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
        schema, adapters = wrap_explicit_schema(options.schema, function, name, where), {}
    else:
        schema, adapters = function_schema(function, name, where), _adapters(function, where)
    target = function if inspect.isroutine(function) else type(function).__call__
    known = {"name": schema["function"]["name"], "schema": schema, "closed": options.schema is None}
    spec = ToolSpec(**vars(options) | known, is_async=inspect.iscoroutinefunction(target))
    parameters = inspect.signature(function).parameters.values()
    positional = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    return LoadedTool(spec, function, positional, adapters)


def _adapters(function: Callable[..., Any], where: str) -> dict[str, pydantic.TypeAdapter[Any]]:
    hints = type_hints(function, where)
    adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
    for name in inspect.signature(function).parameters:
        hint = hints.get(name)
        try:
            if hint is not None and not any(hint is plain for plain in _PLAIN):
                adapters[name] = pydantic.TypeAdapter(hint)
        except Exception as error:  # pydantic raises several unrelated kinds
            raise PluginError(
                f"{where}: parameter '{name}': values of the type {hint!r} cannot be made from JSON ({error})"
            ) from error
    return adapters


def _integers_kept(given: Any, made: Any) -> Any:
    """Return what pydantic made, with the whole numbers of plain JSON as they were written.

    A model that writes 20 for a float is shown what a plain call of the function would give it:
    "Sum: 42" and not "Sum: 42.0". The fields of objects become what their classes say.
    """
    if type(given) is int and type(made) is float:
        return given if made == float(given) else made  # arguments have no more digits than a float holds
    if type(given) is list and type(made) is list and len(given) == len(made):
        return [_integers_kept(before, after) for before, after in zip(given, made, strict=True)]
    if type(given) is dict and type(made) is dict and given.keys() == made.keys():
        return {key: _integers_kept(given[key], value) for key, value in made.items()}
    return made


def _problem(name: str, item: Any) -> str:
    path = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
    return f"parameter '{path}': {item['msg'][:200]}, got {item['input']!r:.60}"


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
