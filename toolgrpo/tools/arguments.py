"""Arguments that a model wrote, checked against a tool's schema, in words the model can learn from.

Nothing that a model writes raises here or takes long: what is nested too deeply or has too many
digits is refused before anything walks it (`bounds.py`), coercion takes one step per value
(`arguments.py`), and a check has a bound of processor time (`validation.py`).
Not covered: what only the tool's own types can check (a pydantic validator, say); the worker does
that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any
from urllib.parse import unquote

from jsonschema import ValidationError

from toolgrpo.support.shipped_files import nearest
from toolgrpo.tools.bounds import MAX_DIGITS, beyond_bounds, read_json
from toolgrpo.tools.render import describe_exception
from toolgrpo.tools.validation import SchemaValidator

_MAX_COMPLAINTS = 3
_MAX_USAGE_CHARS = 500
_MAX_SIGNATURES = 24
_ONE_LINE_CHARS = 240  # signatures that are longer together stand on a line each


# What is wrong with arguments, in short sentences that a model can learn from.

_ARTICLES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_RULES = {
    "minimum": "be at least",
    "maximum": "be at most",
    "exclusiveMinimum": "be more than",
    "exclusiveMaximum": "be less than",
    "multipleOf": "be a multiple of",
    "pattern": "match the pattern",
}
_EXAMPLES: dict[str, Any] = {"integer": 3, "number": 2.5, "string": "text", "boolean": True, "null": None}
_MAX_EXAMPLE_KEYS, _MAX_EXAMPLE_DEPTH, _MAX_EXAMPLE_CHARS = 4, 4, 120


# Values brought into the type that a schema wants, where that loses nothing.
#
# "3" for an integer, 3.0 for an integer, "true" for a boolean, 7 for a string, a list or object that
# was written as JSON text. "abc" never becomes a number and 3.5 never an integer. Each value is
# looked at once, whatever the schema.

_INTEGER = re.compile(rf"[+-]?\d{{1,{MAX_DIGITS}}}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")

_KINDS: dict[type, str] = {
    **{bool: "boolean", int: "integer", float: "number", str: "string"},
    **{type(None): "null", list: "array", dict: "object"},
}


class Coercer:
    """Knows one schema, that has been checked: its references end."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known_kinds: dict[int, tuple[str, ...]] = {}  # by the identity of a part of the schema
        self._parts: list[Mapping[str, Any]] = []  # those parts, kept so that no other takes an identity over

    def coerced(self, value: Any, schema: Any) -> Any:
        """Return the value in the type wanted, where that loses nothing; else as it is."""
        schema = self._referred(schema)
        if not isinstance(schema, Mapping):
            return value
        kinds = self.kinds(schema)
        if isinstance(value, str) and "string" not in kinds and kinds:
            value = _from_text(value, kinds)
        elif isinstance(value, float) and "integer" in kinds and "number" not in kinds and value.is_integer():
            value = int(value)
        elif type(value) is int and kinds and set(kinds) <= {"string", "null"}:
            value = str(value) if "enum" not in schema else value
        return self._inside(value, schema)

    def kinds(self, schema: Any) -> tuple[str, ...]:
        """Return the JSON types a schema allows; none if it, or an alternative, does not say."""
        schema = self._referred(schema)
        if not isinstance(schema, Mapping):
            return ()
        if id(schema) not in self._known_kinds:
            if "anyOf" in schema:
                parts = [self.kinds(sub) for sub in schema["anyOf"]]
                kinds = tuple(dict.fromkeys(kind for part in parts for kind in part)) if all(parts) else ()
            else:
                values = schema.get("enum", [schema["const"]] if "const" in schema else [])
                kind = schema.get("type", tuple(dict.fromkeys(_KINDS[type(value)] for value in values)))
                kinds = (kind,) if isinstance(kind, str) else tuple(kind)
            self._known_kinds[id(schema)] = kinds
            self._parts.append(schema)
        return self._known_kinds[id(schema)]

    def _inside(self, value: Any, schema: Mapping[str, Any]) -> Any:
        if not isinstance(value, list | dict):
            return value
        if "anyOf" in schema:  # Optional[X]: look into the X; with several candidates nothing is guessed
            candidates = [sub for sub in schema["anyOf"] if self.kinds(sub) != ("null",)]
            sub = self._referred(candidates[0]) if len(candidates) == 1 else None
            return self._inside(value, sub) if isinstance(sub, Mapping) else value
        if isinstance(value, list):
            first, rest = schema.get("prefixItems"), schema.get("items")
            of_places = [*(first if isinstance(first, list) else ()), *repeat(rest, len(value))]
            return [
                self.coerced(item, of) if isinstance(of, Mapping) else item
                for item, of in zip(value, of_places, strict=False)
            ]
        properties, other = schema.get("properties", {}), schema.get("additionalProperties")
        return {key: self.coerced(item, properties.get(key, other)) for key, item in value.items()}

    def _referred(self, schema: Any) -> Any:
        """Return what a reference into this schema leads to; anything else as it is."""
        while isinstance(schema, Mapping) and str(schema.get("$ref", "")).startswith("#/"):
            target: Any = self._root
            for part in schema["$ref"][2:].split("/"):
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if target is None:
                return schema
            schema = target
        return schema


def _from_text(text: str, kinds: Sequence[str]) -> Any:
    stripped = text.strip()
    if "null" in kinds and stripped in ("null", "None"):
        return None
    if ("integer" in kinds or "number" in kinds) and _INTEGER.fullmatch(stripped):
        return int(stripped)
    if "number" in kinds and _NUMBER.fullmatch(stripped):
        number = float(stripped)
        return number if math.isfinite(number) else text
    if "boolean" in kinds and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if ("array" in kinds and stripped.startswith("[")) or ("object" in kinds and stripped.startswith("{")):
        with suppress(ValueError):
            return read_json(stripped)
    return text


def complaint_of(error: ValidationError, kinds_of: Callable[[Any], Sequence[str]]) -> str:
    """Return one validation error as a short sentence."""
    where = _where(error.absolute_path)
    kinds = kinds_of(error.schema)
    got = f"got {short(error.instance)}"
    rule: Any = error.validator_value
    if error.validator == "required":
        instance: Any = error.instance
        missing = [name for name in rule if name not in instance]
        names = short(", ".join(f"'{name}'" for name in missing), 200, quote=False)
        inside = f"{where}: " if error.absolute_path else ""
        return f"{inside}missing {'parameter' if not inside else 'key'}{'s' if len(missing) > 1 else ''} {names}"
    if error.validator == "additionalProperties":
        fields: Any = error.schema.get("properties", {})  # type: ignore[union-attr]  # one with this keyword is an object
        close = names_near(str(error.path[-1]), fields)
        inside = (
            f"; its object has {short(', '.join(fields), 200, quote=False)}" if len(error.absolute_path) > 1 else ""
        )
        return f"unknown {where}{f', did you mean {close}?' if close else ''}{inside}"
    if error.validator in ("enum", "const"):
        allowed = rule if error.validator == "enum" else [rule]
        return f"{where} must be one of {', '.join(short(v) for v in allowed[:20])}; {got}"
    if error.validator in _RULES:
        return f"{where} must {_RULES[error.validator]} {short(rule, quote=False)}, {got}"
    if error.validator == "anyOf" and (inner := _inside_the_fitting_branch(error)) is not None:
        return complaint_of(inner, kinds_of)
    if error.validator in ("type", "anyOf") and kinds:
        wanted = " or ".join(dict.fromkeys(_ARTICLES.get(kind, kind) for kind in kinds))
        example = _like(error.schema, kinds[0]) if len(set(kinds)) == 1 else ""
        return f"{where} must be {wanted}{example}, {got}"
    return f"{where}: {short(error.message, quote=False)}"


def example_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments that this schema takes: those that are required, or all."""
    found: Mapping[str, Any] = _example({**parameters, "type": "object"})
    return found


def _like(schema: Any, kind: str) -> str:
    """Return an example of what was wanted; none where the word for it says enough."""
    if kind not in ("integer", "number", "array", "object"):
        return ""
    text = json.dumps(_example({**schema, "type": kind}), ensure_ascii=False, default=str)
    return f" like {text}" if len(text) <= _MAX_EXAMPLE_CHARS else ""


def _example(schema: Any, depth: int = 0) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_EXAMPLE_DEPTH:
        return "value"
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if schema.get("anyOf"):
        return _example(schema["anyOf"][0], depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "array":
        member = schema.get("items")
        if not isinstance(member, Mapping) or member.get("type") == "integer":
            return [1, 2]
        return [_example(member, depth + 1)]
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = list(schema.get("required") or properties)[:_MAX_EXAMPLE_KEYS]
        return {key: _example(properties.get(key), depth + 1) for key in wanted} or ({"key": "value"} if depth else {})
    return _EXAMPLES.get(str(kind), "value")


def _inside_the_fitting_branch(error: ValidationError) -> ValidationError | None:
    """Return what is wrong inside the one branch whose type the value has, if it is one."""
    branches: dict[Any, list[ValidationError]] = {}
    for sub in error.context or ():
        if sub.relative_schema_path:  # a branch that is `false` has none, and nothing fits it
            branches.setdefault(sub.relative_schema_path[0], []).append(sub)
    fitting = [
        errors for errors in branches.values() if not any(e.validator == "type" and not e.relative_path for e in errors)
    ]
    return fitting[0][0] if len(fitting) == 1 else None


def _where(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    text = short(text, 120, quote=False)
    return f"parameter '{text}'" if text else "the arguments"


def short(value: Any, limit: int = 60, *, quote: bool = True) -> str:
    """Return a value as JSON, or as its own text, cut to a limit."""
    text = json.dumps(value, ensure_ascii=False, default=str) if quote else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments as the tool will get them, or what is wrong with them."""

    arguments: dict[str, Any]
    complaint: str | None = None


class ArgumentChecker:
    """Checks the arguments of one tool; making it raises PluginError for an unusable schema."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any],
        where: str | None = None,
        *,
        unchecked: bool = False,
        closed: bool = False,
    ) -> None:
        """`unchecked`: only what could harm is refused, and nothing is made to fit the schema.

        `closed`: no object takes keys that the schema does not name.
        """
        self._name = name
        self._unchecked = unchecked
        self._validator = SchemaValidator(parameters, where or f"tool '{name}'", closed=closed)
        self._schema = self._validator.schema
        self._coercer = Coercer(self._schema)
        self._usage = signature_text(name, parameters)

    def check(self, arguments: Mapping[str, Any]) -> Checked:
        """Coerce what loses nothing, then complain about the rest."""
        try:
            known: dict[str, Any] = {}
            if (beyond := beyond_bounds(arguments)) is None:
                known = dict(arguments)
                known = known if self._unchecked else self._coercer.coerced(known, self._schema)
                beyond = beyond_bounds(known)  # text that was read may nest deeper than it did
            if beyond is not None:
                return self._refused(f"the arguments cannot be used: {beyond}")
            if self._unchecked:
                return Checked(known)
            errors = self._validator.errors(known)
            if not errors:
                return Checked(known)
            complaints = [complaint_of(error, self._coercer.kinds) for error in errors[:_MAX_COMPLAINTS]]
        except TimeoutError:
            return self._refused("the arguments take too long to check; write them shorter and simpler")
        except Exception as error:  # a validator meets values nobody thought of; none of them may end a run
            return self._refused(f"the arguments cannot be checked ({describe_exception(error, 200)})")
        more = len(errors) - len(complaints)
        rest = f"; and {more} more" if more > 0 else ""
        return self._refused("; ".join(dict.fromkeys(complaints)) + rest)

    def _refused(self, complaint: str) -> Checked:
        return Checked({}, f"{self._name}: {complaint}. Usage: {self._usage}")


def names_near(word: str, known: Iterable[str]) -> str:
    """Return the nearest known names, quoted and joined with "or"; empty if none is near."""
    by_fold = {name.lower(): name for name in known}
    return " or ".join(f"'{by_fold[name]}'" for name in nearest(word.lower(), by_fold, 2, alike=0.6))


def signature_text(name: str, parameters: Mapping[str, Any]) -> str:
    """Return how to call a tool, as in `add(a: integer, b: integer (optional), base: integer = 10)`."""
    required = set(parameters.get("required", ()))
    parts = [
        f"{key}: {_type_text(sub)}" + ("" if key in required else _or_without(sub))
        for key, sub in parameters.get("properties", {}).items()
    ]
    return short(f"{name}({', '.join(parts)})", _MAX_USAGE_CHARS, quote=False)


def signatures_text(schemas: Iterable[Mapping[str, Any]], indent: str = "") -> str:
    """Return how to call these tools: side by side, or one below the other where that would be long.

    Of a large catalogue the first ones, and how many more there are.
    """
    functions = [schema["function"] for schema in schemas]
    shown = functions[:_MAX_SIGNATURES]
    texts = [signature_text(function["name"], function.get("parameters") or {}) for function in shown]
    if len(functions) > len(shown):
        texts.append(f"and {len(functions) - len(shown)} more")
    return (", " if sum(map(len, texts)) <= _ONE_LINE_CHARS else f",\n{indent}").join(texts)


def _or_without(schema: Any) -> str:
    default = schema.get("default") if isinstance(schema, Mapping) else None
    return " (optional)" if default is None else f" = {short(default, 30)}"


def _type_text(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return " | ".join(short(value) for value in schema["enum"][:8])
    if "const" in schema:
        return short(schema["const"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type_text(sub) for sub in schema["anyOf"]))
    kind = schema.get("type", "any")
    text = " | ".join(kind) if isinstance(kind, list) else str(kind)
    if text == "array" and isinstance(schema.get("items"), Mapping):
        text = f"array of {_type_text(schema['items'])}"
    return f"{text} | null" if schema.get("nullable") else text
