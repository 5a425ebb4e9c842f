"""From a plugin file, a module or callables to tools that can be called, and perhaps an environment.

Runs where the tools will run (the supervisor and the workers; the trainer's process only for tools
that ask for it), so a plugin file whose import crashes or hangs does not take the trainer with it.

An environment is a class with `reset(**row)`, public methods that are the tools, and optionally
`HOOKS`: what each is asked, and when, stands in `EpisodeHooks` (`tools/base.py`). Classes written for
TRL's `environment_factory` work as they are.

Every error names the file and what to do.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pydantic
import pydantic_core
from pydantic.fields import FieldInfo

from confined_python.processes.wire import unpack_objects
from toolgrpo.errors import PluginError
from toolgrpo.support.plugin_files import import_failed, import_file, user_traceback
from toolgrpo.tools.base import HOOKS
from toolgrpo.tools.plugin.schema import called, function_schema, own_parameters, type_hints, wrap_explicit_schema
from toolgrpo.tools.plugin.tool_spec import ToolSpec, options_of
from toolgrpo.tools.render import BadArguments

_PLAIN = (str, bool, Any)  # JSON gives these as they are
_EXAMPLE = "TOOL_FUNCTIONS = [my_function, another_function]"
_SPEAKS = "next_user_message"
_NOT_TOOLS = ("reset", "state_key", *HOOKS)
_MOST_LITERALS = 200
Examples = Mapping[str, Sequence[Any]]


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
    fields: Mapping[str, FieldInfo] = field(default_factory=dict)  # defaults in pydantic's form: `k: int = Field(5)`

    def call(self, arguments: Mapping[str, Any], instance: object = None) -> Any:
        """Call it with JSON arguments, on `instance` if it is a method; a coroutine function gives its coroutine.

        The trainer has checked the arguments against the schema. Here pydantic makes what the annotations
        say (an Enum member, a dataclass, a date), and BadArguments says what only the types can check.
        """
        values = {name: one.get_default(call_default_factory=True) for name, one in self.fields.items()}
        values.update(arguments)
        problems: list[str] = []
        for name, adapter in self.adapters.items():
            if name in arguments:
                try:
                    values[name] = _integers_kept(values[name], adapter.validate_python(values[name]))
                except pydantic.ValidationError as error:
                    problems += [_problem(name, item) for item in error.errors(include_url=False)[:3]]
        if problems:
            raise BadArguments("; ".join(problems))
        function = self.function if instance is None else getattr(instance, self.function.__name__)
        given = [place for place, name in enumerate(self.positional, start=1) if name in values]
        before = self.positional[: max(given, default=0)]  # those left out in between have their defaults
        defaults = inspect.signature(function).parameters if len(given) < len(before) else {}
        missing = [name for name in before if name not in values and defaults[name].default is inspect.Parameter.empty]
        if missing:
            raise BadArguments(f"parameter {missing[0]!r} is missing, and others follow it")
        positional = [values.pop(name) if name in values else defaults[name].default for name in before]
        return function(*positional, **values)


def load_functions(source: PluginSource) -> list[LoadedTool]:
    """Load all tools of a source, in its order."""
    if source.callables is not None:
        return tools_of(unpickle_callables(source.callables), source.label)
    module = import_source(source)
    return tools_of(_exported(module, source.label), source.label, _examples(module, source.label))


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


def tools_of(
    functions: Iterable[Any], label: str, examples: Examples | None = None, *, of_class: bool = False
) -> list[LoadedTool]:
    """Return the tools of callables (methods `of_class` get their object later), each checked, no two of one name; what is
    wrong is said of all at once.
    """
    loaded: list[LoadedTool] = []
    seen: dict[str, str] = {}
    wrong: list[str] = []
    for function in functions:
        try:
            if inspect.isfunction(function) and not of_class:
                _check_has_object(function, label)
            tool = _load_one(function, label, examples)
        except PluginError as error:
            wrong.append(str(error))
            continue
        place = _place(function, label)
        if tool.spec.name in seen:
            raise PluginError(
                f"Two tools are named '{tool.spec.name}': {seen[tool.spec.name]} and {place}. "
                "Rename one, or give it another name with @tool(name=...)."
            )
        seen[tool.spec.name] = place
        loaded.append(tool)
    if wrong:
        fine = f"\nThe others are fine: {', '.join(seen)}." if seen else ""
        raise PluginError("\n".join(wrong) + fine)
    return loaded


def _check_has_object(function: FunctionType, label: str) -> None:
    if list(inspect.signature(function).parameters)[:1] == ["self"]:
        raise PluginError(
            f"{_place(function, label)}: {function.__qualname__} is a method without its object. List the method of an object, "
            f"as in `[MyTools().{function.__name__}]`; for tools with state set `ENVIRONMENT` (docs/how-to/tools.md)."
        )


def _load_one(function: Any, label: str, examples: Examples | None) -> LoadedTool:
    options = options_of(function)
    named = (
        function if hasattr(function, "__name__") or not isinstance(function, functools.partial) else called(function)
    )
    name = options.name or getattr(named, "__name__", None) or type(function).__name__
    if not name.replace("-", "_").isidentifier():
        raise PluginError(
            f"{label}: a tool named {name!r} cannot be called by a model. "
            "Define it with `def` and a name, or name it with @tool(name=...)."
        )
    where = f"{_place(function, label)}: tool '{name}'"
    if inspect.isclass(function):
        raise PluginError(
            f"{where}: it is a class. List functions, or methods of an object; for tools with state set "
            f"`ENVIRONMENT = {name}` (docs/how-to/tools.md)."
        )
    if inspect.isasyncgenfunction(called(function)):
        raise PluginError(f"{where}: it is an async generator. Return one result instead of yielding several.")
    if options.schema is not None:
        schema, adapters = wrap_explicit_schema(options.schema, function, name, where), {}
        _check_takes(function, schema, where)
    else:
        schema, adapters = function_schema(function, name, where), _adapters(function, where)
    known = {"name": schema["function"]["name"], "schema": schema, "closed": options.schema is None}
    with suppress(Exception):  # a user's objects may raise when they are looked at, and it only helps drawing
        known["literals"] = literals_of(function)
    known["examples"] = examples or {}
    spec = ToolSpec(**vars(options) | known, is_async=inspect.iscoroutinefunction(called(function)))
    parameters = own_parameters(function)
    positional = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    fields = {one.name: one.default for one in parameters if isinstance(one.default, FieldInfo)}
    optional = {name: one for name, one in fields.items() if not one.is_required()}
    return LoadedTool(spec, function, positional, adapters, optional)


def _check_takes(function: Callable[..., Any], schema: Mapping[str, Any], where: str) -> None:
    own = inspect.signature(function).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own):
        return
    takes = {one.name for one in own if one.kind is not inspect.Parameter.VAR_POSITIONAL}
    strange = sorted((schema["function"]["parameters"].get("properties") or {}).keys() - takes)
    if strange:
        raise PluginError(f"{where}: its schema names {', '.join(strange)}, which the function does not take by name")


def _adapters(function: Callable[..., Any], where: str) -> dict[str, pydantic.TypeAdapter[Any]]:
    hints = type_hints(function, where)
    adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
    for name in [one.name for one in own_parameters(function)]:
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


def _examples(module: ModuleType, label: str) -> Examples:
    """Return the values that a module registers for its parameters, as JSON has them."""
    found = getattr(module, "EXAMPLES", {})
    try:
        plain = pydantic_core.to_jsonable_python({name: list(values) for name, values in found.items()})
    except Exception:  # whatever it is, it is not that
        plain = {"": []}
    if not all(isinstance(name, str) and values and not isinstance(found[name], str) for name, values in plain.items()):
        raise PluginError(
            f"EXAMPLES in {label} must be a dict of lists of values, by parameter, got {found!r:.80}. "
            'Write it like this: EXAMPLES = {"city": ["Oslo", "Bergen"]}'
        )
    examples: Examples = plain
    return examples


def literals_of(function: Any, depth: int = 3) -> list[Any]:
    """Return short texts and numbers that stand in a function's code, or in the tables and helpers that it names.

    Arguments that a tool knows are often there: the keys of a table, the texts that it compares with.
    """
    inner = inspect.unwrap(function)
    code, found = getattr(inner, "__code__", None), list[Any]()
    known = {**getattr(inner, "__globals__", {}), **getattr(getattr(inner, "__self__", None), "__dict__", {})}
    pending: list[Any] = [code]
    while pending and len(found) < _MOST_LITERALS:
        value = pending.pop(0)
        if inspect.iscode(value):
            named = [known[name] for name in value.co_names if name in known]
            helpers = [one for one in named if inspect.isroutine(one) and hasattr(inspect.unwrap(one), "__code__")]
            found += [one for helper in helpers if depth > 1 for one in literals_of(helper, depth - 1)]
            pending += [one for one in named if isinstance(one, dict | list | tuple | set | frozenset)]
            pending += [const for const in value.co_consts if const != inner.__doc__]
        elif isinstance(value, dict | list | tuple | set | frozenset):
            # a set has another order in each process
            pending += (sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value))[:_MOST_LITERALS]
        elif (isinstance(value, str) and 0 < len(value) <= 40 and value == value.strip() and value.isprintable()) or (
            type(value) in (int, float) and abs(value) < 1e12
        ):
            found.append(value)
    return list(dict.fromkeys(found))[:_MOST_LITERALS]


def _place(function: Any, label: str) -> str:
    """Return where a function stands, as in `file.py:12`, or what else is known."""
    code = getattr(inspect.unwrap(function) if inspect.isroutine(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else label


# All that a process has loaded.


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

    @property
    def methods(self) -> list[str]:
        """The attributes of its instances that are called."""
        return [*(tool.function.__name__ for tool in self.tools.values()), *self.spec.hooks]


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A loaded plugin without its code, for the trainer; it crosses processes as JSON."""

    functions: tuple[ToolSpec, ...] = ()
    environment: EnvironmentSpec | None = None
    import_s: float = 0.0  # how long loading took
    heavy_imports: tuple[str, ...] = ()  # packages that training needs and tools seldom do, if it imported any


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
    unseen = [f"{key} is a {type(one).__name__}" for key, one in vars(owner).items() if _is_unseen(key, one)]
    if unseen:
        raise PluginError(
            f"{where}: {'; '.join(unseen)}, and only plain methods are seen. Write `def NAME(self, ...)`, or begin its name "
            f"with _ if it is no tool"
        )
    tools = [_named(key, one) for key, one in methods.items() if not key.startswith("_") and key not in _NOT_TOOLS]
    if not tools and _SPEAKS not in methods:
        raise PluginError(
            f"{where} has no public methods besides reset, so the model could do nothing in it. Add one; a "
            f"task that only asks and judges needs rows and a reward function."
        )
    examples = {} if source.callables else _examples(import_source(source), source.label)
    loaded = tools_of(tools, where, examples, of_class=True)
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


def _named(name: str, method: FunctionType) -> FunctionType:
    """Return a method under the name that its class has for it: a decorator or `b = a` leaves the function another one."""
    if method.__name__ == name:
        return method
    copy = FunctionType(method.__code__, method.__globals__, closure=method.__closure__)
    functools.update_wrapper(copy, method)  # so its signature is that of the method
    copy.__name__ = name
    return copy


def _is_unseen(name: str, member: Any) -> bool:
    """Return whether a member of a class was meant to be asked, and would not be."""
    if name.startswith("_"):
        return False
    if isinstance(member, functools.partialmethod | functools._lru_cache_wrapper):
        return True
    return name in HOOKS and isinstance(member, classmethod | property | functools.cached_property)


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
