"""JSON arguments into what a function's annotations say: an Enum member, a dataclass, a pydantic
model, a date.

The trainer has already checked the arguments against the schema; here pydantic makes the objects
and checks what only the types themselves know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from toolgrpo.errors import PluginError
from toolgrpo.tools.plugin.schema import type_hints
from toolgrpo.tools.render import BadArguments

_PLAIN = (str, bool, Any)  # JSON already gives these


class ArgumentConverter:
    """Calls one function with JSON arguments."""

    def __init__(self, function: Callable[..., Any], where: str, *, typed: bool) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        self._adapters: dict[str, pydantic.TypeAdapter[Any]] = {}
        if typed:
            hints = type_hints(function, where)
            for parameter in parameters:
                hint = hints.get(parameter.name)
                if hint is not None and not any(hint is plain for plain in _PLAIN):
                    self._adapters[parameter.name] = _adapter(hint, where, parameter.name)

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Return what the function, or its bound method, returns; raise BadArguments before it is called."""
        values = dict(arguments)
        problems: list[str] = []
        for name, adapter in self._adapters.items():
            if name not in values:
                continue
            try:
                values[name] = _integers_kept(values[name], adapter.validate_python(values[name]))
            except pydantic.ValidationError as error:
                problems += [_problem(name, item) for item in error.errors(include_url=False)[:3]]
        if problems:
            raise BadArguments("; ".join(problems))
        positional = [values.pop(name) for name in self._positional if name in values]
        return function(*positional, **values)


def _adapter(hint: Any, where: str, name: str) -> pydantic.TypeAdapter[Any]:
    try:
        return pydantic.TypeAdapter(hint)
    except Exception as error:  # pydantic raises several unrelated kinds
        raise PluginError(
            f"{where}: parameter '{name}': values of the type {hint!r} cannot be made from JSON ({error})"
        ) from error


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
