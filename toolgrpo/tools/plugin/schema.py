"""Tool schemas from signatures and docstrings, in the OpenAI function form.

For the simple types the result equals `transformers.utils.get_json_schema`, so that prompts stay
those that TRL users have (a test compares them; only a bare `list`, and unions of types with
insides, say more here), with one part left out: the return type. Servers of OpenAI's interface drop
it, and a served prompt must be the trained one. Everything richer (Enum, dataclass, TypedDict,
pydantic models, dates, Annotated constraints, sets) comes from pydantic, with references inlined.
transformers itself is not used: importing it takes seconds, and a tool worker must start in well
under one; it also reads only Google docstrings. docstring_parser reads Google, NumPy and reST.

A parameter that the docstring says nothing about is shown by its name and type alone; `load_tools`
warns of it.

Not covered: recursive models (refused with a sentence), *args and **kwargs (give an explicit
schema).
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import docstring_parser
import pydantic
import typing_extensions
from pydantic.fields import FieldInfo

from toolgrpo.errors import PluginError
from toolgrpo.support.plugin_files import missing_import

_BASIC: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_FIRST_SECTION = re.compile(r"^(.*?)[\n\s]*(?:Args:|Returns:|Raises:|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DocText:
    """A docstring, taken apart."""

    description: str
    parameters: Mapping[str, str]


def parse_docstring(doc: str) -> DocText:
    """Read a docstring as Google, NumPy or reST, whichever fits best."""
    doc = inspect.cleandoc(doc)
    parsed = docstring_parser.parse(doc)
    if parsed.style in (docstring_parser.DocstringStyle.GOOGLE, None) or not parsed.meta:
        found = _FIRST_SECTION.search(doc)
        description = found.group(1).strip() if found else doc
    else:
        description = (parsed.description or "").strip()
    return DocText(
        description=description,
        parameters={
            name.strip(): re.sub(r"\s*\n+\s*", " ", (p.description or "").strip())
            for p in parsed.params
            for name in p.arg_name.split(",")  # NumPy's `x, y : int`
        },
    )


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs in the end: that of a partial, the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def type_hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Resolve the annotations; PluginError that says which could not be."""
    try:
        target = called(function)
        return {name: modern_hint(hint) for name, hint in typing.get_type_hints(target, include_extras=True).items()}
    except Exception as error:  # annotations are arbitrary code: NameError, TypeError, SyntaxError, ...
        cure = missing_import(error.name) if isinstance(error, NameError) and error.name else None
        raise PluginError(
            f"{where}: the annotations cannot be read ({type(error).__name__}: {error}). Import every name that the "
            f"annotations use at the top of the file, outside `if TYPE_CHECKING`{f'; {cure}' if cure else '.'}"
        ) from error


def modern_hint(hint: Any, _inside: tuple[Any, ...] = ()) -> Any:
    """Return an annotation with `typing.TypedDict`s as those of typing_extensions.

    pydantic takes no others before 3.12.
    """
    if typing_extensions.TypedDict is typing.TypedDict or hint in _inside:
        return hint
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        required = hint.__required_keys__
        fields = {
            key: (typing_extensions.Required if key in required else typing_extensions.NotRequired)[
                modern_hint(value, (*_inside, hint))
            ]
            for key, value in typing_extensions.get_type_hints(hint, include_extras=False).items()
        }
        return typing_extensions.TypedDict(hint.__name__, fields)  # type: ignore[operator]  # the functional form
    origin, args = get_origin(hint), get_args(hint)
    if origin in (list, dict, tuple, Union, types.UnionType) and args:
        modern = tuple(arg if arg is ... else modern_hint(arg, _inside) for arg in args)
        if modern != args:
            return Union[modern] if origin in (Union, types.UnionType) else origin[modern]  # noqa: UP007 (a tuple of members)
    return hint


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of one annotation."""
    try:
        basic = _BASIC.get(hint)
    except TypeError:  # unhashable, so not a basic one
        basic = None
    if basic is not None:
        return dict(basic)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Union or origin is types.UnionType:
        return _union_schema(args, where)
    if origin is Literal and all(type(arg) in (int, float, str, bool, type(None)) for arg in args):
        names = list(dict.fromkeys(_BASIC[type(arg)]["type"] for arg in args))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(args)}
    if origin is list and args:
        return {"type": "array", "items": type_schema(args[0], where)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [type_schema(arg, where) for arg in args]}
    if origin is dict and len(args) == 2:
        return {"type": "object", "additionalProperties": type_schema(args[1], where)}
    return _pydantic_schema(hint, where)


def function_schema(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """Return the OpenAI function form of a function with typed parameters and a docstring."""
    doc_text = inspect.getdoc(function)
    if doc_text in (None, inspect.getdoc(type(function))):  # of a partial, or of an object's class
        of_class = None if isinstance(function, functools.partial) else doc_text
        doc_text = inspect.getdoc(called(function)) or of_class
    if not doc_text:
        raise PluginError(
            f"{where}: no docstring. The model reads it to know what the tool does: say in a line what it does, "
            "then describe each parameter in an `Args:` section (a method that is no tool: _NAME)."
        )
    doc = parse_docstring(doc_text)
    hints = type_hints(function, where)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in own_parameters(function):
        properties[parameter.name] = _parameter_schema(parameter, hints, doc, where)
        default = parameter.default
        if default is inspect.Parameter.empty or (isinstance(default, FieldInfo) and default.is_required()):
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described = {"name": name, "description": doc.description, "parameters": parameters}
    return {"type": "function", "function": described}


def wrap_explicit_schema(
    schema: Mapping[str, Any], function: Callable[..., Any], name: str, where: str
) -> dict[str, Any]:
    """Return an explicit schema in the OpenAI form, given so or as the parameters object."""
    inner: Any = schema.get("function", schema) if schema.get("type") == "function" else schema
    if "parameters" not in inner:
        inner = {"parameters": inner}
    parameters = inner["parameters"]
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise PluginError(
            f"{where}: the explicit schema must describe an object: "
            '{"type": "object", "properties": {...}, "required": [...]}; got ' + repr(parameters)[:200]
        )
    description = inner.get("description") or (parse_docstring(inspect.getdoc(function) or "").description)
    if not description:
        raise PluginError(f"{where}: an explicit schema without a description needs a docstring on the function")
    try:
        plain = json.loads(json.dumps(parameters))
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where}: the explicit schema is not plain JSON: {error}") from error
    plain.setdefault("properties", {})
    return {
        "type": "function",
        "function": {"name": inner.get("name", name), "description": description, "parameters": plain},
    }


def own_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters without an implicit receiver, and without what a partial has filled in."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        parameters = parameters[1:]
    filled = function.keywords if isinstance(function, functools.partial) else {}
    return [one for one in parameters if one.name not in filled]


def _parameter_schema(
    parameter: inspect.Parameter, hints: Mapping[str, Any], doc: DocText, where: str
) -> dict[str, Any]:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise PluginError(
            f"{where}: parameter '{parameter}' has no fixed form that a model could be told. "
            "Name every parameter (a list in place of *args), or describe **kwargs with @tool(schema=...). If this is what a "
            "decorator made of your function, put @functools.wraps(function) above its wrapper; of a tool object of another "
            "library list the function itself (`forward`, `func`)."
        )
    if parameter.name not in hints:
        raise PluginError(
            f"{where}: parameter '{parameter.name}' has no annotation. Write its type, as in `{parameter.name}: int`."
        )
    hint = hints[parameter.name]
    if isinstance(parameter.default, FieldInfo):  # `k: int = Field(5, ge=1)`
        hint = Annotated[hint, parameter.default]
    schema = type_schema(hint, f"{where}: parameter '{parameter.name}'")
    text = doc.parameters.get(parameter.name)
    if text is None:
        said = [one for one in get_args(hint)[1:] if isinstance(one, str)] if get_origin(hint) is Annotated else []
        return schema if not said or "description" in schema else {**schema, "description": said[0]}
    if choices := _CHOICES.search(text):
        try:
            schema["enum"] = [c.strip() if isinstance(c, str) else c for c in json.loads(choices.group(1))]
        except ValueError as error:
            raise PluginError(
                f"{where}: the choices of parameter '{parameter.name}' must be a JSON list, "
                f'as in (choices: ["tea", "coffee"]); got {choices.group(1)!r}'
            ) from error
        text = text[: choices.start()].strip()
    schema["description"] = text
    return schema


def _union_schema(args: tuple[Any, ...], where: str) -> dict[str, Any]:
    members = [type_schema(arg, where) for arg in args if arg is not type(None)]
    if len(members) == 1:
        schema = members[0]
    elif all(set(member) == {"type"} and isinstance(member["type"], str) for member in members):
        schema = {"type": sorted(member["type"] for member in members)}
    else:
        schema = {"anyOf": members}
    if type(None) in args:
        schema["nullable"] = True
    return schema


def _pydantic_schema(hint: Any, where: str) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = pydantic.TypeAdapter(hint).json_schema()
    except Exception as error:  # pydantic raises several unrelated kinds for types it cannot describe
        first_line = str(error).strip().splitlines()[0]
        raise PluginError(
            f"{where}: no JSON schema can be made for the type {hint!r} ({first_line}). "
            "Use str, int, float, bool, list, dict, Literal, Enum, a dataclass, a TypedDict or a pydantic model."
        ) from error
    definitions = schema.pop("$defs", {})
    inlined: dict[str, Any] = _inline(schema, definitions, (), where)
    return inlined


def _inline(node: Any, definitions: Mapping[str, Any], path: tuple[str, ...], where: str) -> Any:
    """Replace the schema's `$ref`s by what they name, and drop pydantic's titles."""
    if isinstance(node, list):
        return [_inline(item, definitions, path, where) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        key = node["$ref"].rpartition("/")[2]
        if key in path:
            raise PluginError(
                f"{where}: {key} refers to itself; a recursive type cannot be shown to a model. "
                "Flatten it, or give an explicit schema with @tool(schema=...)."
            )
        rest = {k: v for k, v in node.items() if k != "$ref"}
        return _inline({**definitions[key], **rest}, definitions, (*path, key), where)
    result = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties":  # its keys are names of parameters, also one called "title"
            result[key] = {name: _inline(sub, definitions, path, where) for name, sub in value.items()}
        else:
            result[key] = _inline(value, definitions, path, where)
    return result
