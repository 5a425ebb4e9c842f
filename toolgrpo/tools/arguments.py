"""Arguments that a model wrote, checked against a tool's schema, in words the model can learn from.

Coerced is only what loses nothing: "3" for an integer, 3.0 for an integer, "true" for a boolean, 7 for a string, a list
or object that was written as JSON text. "abc" never becomes a number and 3.5 never an integer.

`nullable: true` (the form chat templates know for Optional) is understood as "or null".
Not covered: what only the tool's own types can check (a pydantic validator, say); the worker does that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from toolgrpo.nearest import nearest

__all__ = ["ArgumentChecker", "Checked", "names_near", "signature_text"]

_MAX_COMPLAINTS = 3
_INTEGER = re.compile(r"[+-]?\d{1,400}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_ARTICLES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_EXAMPLES = {"integer": " like 3", "number": " like 2.5", "array": " like [1, 2]", "object": ' like {"key": "value"}'}


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments as the tool will get them, or what is wrong with them."""

    arguments: dict[str, Any]
    complaint: str | None = None


class ArgumentChecker:
    """Checks the arguments of one tool; made once from its schema."""

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._name = name
        self._schema = _with_null(parameters)
        self._open = bool(parameters.get("additionalProperties", False)) or "patternProperties" in parameters
        self._validator = jsonschema.Draft202012Validator(self._schema)
        self._usage = signature_text(name, parameters)

    def check(self, arguments: Mapping[str, Any]) -> Checked:
        """Coerce what loses nothing, then complain about the rest."""
        properties = self._schema.get("properties", {})
        known = {
            key: _coerce(value, properties[key]) if key in properties else value for key, value in arguments.items()
        }
        complaints: list[str] = []
        if not self._open:
            complaints += [self._unknown(key, properties) for key in known if key not in properties]
        complaints += [_complain(error) for error in self._validator.iter_errors(known)]
        if not complaints:
            return Checked(known)
        shown = "; ".join(dict.fromkeys(complaints[:_MAX_COMPLAINTS]))
        more = len(complaints) - _MAX_COMPLAINTS
        rest = f"; and {more} more" if more > 0 else ""
        return Checked({}, f"{self._name}: {shown}{rest}. Usage: {self._usage}")

    def _unknown(self, key: str, properties: Mapping[str, Any]) -> str:
        close = names_near(key, properties)
        hint = f", did you mean {close}?" if close else ""
        return f"unknown parameter '{_short(key, quote=False)}'{hint}"


def names_near(word: str, known: Iterable[str]) -> str:
    """Return the nearest known names, quoted and joined with "or"; empty if none is near."""
    by_fold = {name.lower(): name for name in known}
    return " or ".join(f"'{by_fold[name]}'" for name in nearest(word.lower(), by_fold, 2, alike=0.6))


def signature_text(name: str, parameters: Mapping[str, Any]) -> str:
    """`add(a: integer, b: integer = optional)`: how to call the tool, in one line."""
    required = set(parameters.get("required", ()))
    parts = [
        f"{key}: {_type_text(sub)}" + ("" if key in required else " (optional)")
        for key, sub in parameters.get("properties", {}).items()
    ]
    return f"{name}({', '.join(parts)})"


def _type_text(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(_short(value) for value in schema["enum"][:8])
    if "const" in schema:
        return _short(schema["const"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type_text(sub) for sub in schema["anyOf"]))
    kind = schema.get("type", "any")
    text = " | ".join(kind) if isinstance(kind, list) else str(kind)
    if text == "array" and isinstance(schema.get("items"), Mapping):
        text = f"array of {_type_text(schema['items'])}"
    return f"{text} | null" if schema.get("nullable") else text


def _with_null(schema: Any) -> Any:
    """The schema with `nullable: true` written as JSON Schema knows it."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {
        key: (
            {name: _with_null(sub) for name, sub in value.items()}
            if key == "properties" and isinstance(value, Mapping)
            else value
            if key in ("enum", "const", "default", "examples")
            else _with_null(value)
        )
        for key, value in schema.items()
        if key != "nullable"
    }
    return {"anyOf": [result, {"type": "null"}]} if schema.get("nullable") is True else result


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The JSON types a schema allows, as far as it says."""
    if "anyOf" in schema:
        return [kind for sub in schema["anyOf"] for kind in _kinds(sub)]
    kind = schema.get("type", [])
    return list(kind) if isinstance(kind, list) else [kind]


def _coerce(value: Any, schema: Any) -> Any:
    """The value in the type the schema wants, where that loses nothing; else the value as it is."""
    if not isinstance(schema, Mapping):
        return value
    kinds = _kinds(schema)
    if isinstance(value, str) and "string" not in kinds and kinds:
        value = _from_text(value, kinds)
    elif isinstance(value, float) and "integer" in kinds and "number" not in kinds and value.is_integer():
        value = int(value)
    elif type(value) is int and kinds and set(kinds) <= {"string", "null"}:
        value = str(value) if "enum" not in schema else value
    return _coerce_inside(value, schema)


def _coerce_inside(value: Any, schema: Mapping[str, Any]) -> Any:
    sub = schema
    if "anyOf" in schema:  # Optional[X]: look into the X; with several candidates nothing is guessed
        candidates = [s for s in schema["anyOf"] if isinstance(s, Mapping) and s.get("type") != "null"]
        if len(candidates) != 1:
            return value
        sub = candidates[0]
    if isinstance(value, list) and isinstance(sub.get("items"), Mapping):
        return [_coerce(item, sub["items"]) for item in value]
    if isinstance(value, dict):
        properties = sub.get("properties", {})
        other = sub.get("additionalProperties")
        return {key: _coerce(item, properties.get(key, other)) for key, item in value.items()}
    return value


def _from_text(text: str, kinds: Sequence[str]) -> Any:
    stripped = text.strip()
    if "integer" in kinds and _INTEGER.fullmatch(stripped):
        return int(stripped)
    if "number" in kinds and _NUMBER.fullmatch(stripped):
        number = float(stripped)
        return number if math.isfinite(number) else text
    if "boolean" in kinds and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if ("array" in kinds and stripped.startswith("[")) or ("object" in kinds and stripped.startswith("{")):
        try:
            return json.loads(stripped)
        except (ValueError, RecursionError):
            return text
    return text


def _complain(error: jsonschema.ValidationError) -> str:
    """One validation error in a short sentence."""
    where = _where(error.absolute_path)
    kinds = _kinds(error.schema) if isinstance(error.schema, Mapping) else []
    got = f"got {_short(error.instance)}"
    rule: Any = error.validator_value
    if error.validator == "required":
        instance: Any = error.instance
        missing = [name for name in rule if name not in instance]
        names = ", ".join(f"'{name}'" for name in missing)
        inside = f"{where}: " if error.absolute_path else ""
        return f"{inside}missing {'parameter' if not inside else 'key'}{'s' if len(missing) > 1 else ''} {names}"
    if error.validator in ("enum", "const"):
        allowed = rule if error.validator == "enum" else [rule]
        return f"{where} must be one of {', '.join(_short(v) for v in allowed[:20])}; {got}"
    if error.validator == "anyOf" and (inner := _inside_the_fitting_branch(error)) is not None:
        return _complain(inner)
    if error.validator in ("type", "anyOf") and kinds:
        wanted = " or ".join(dict.fromkeys(_ARTICLES.get(kind, kind) for kind in kinds))
        example = _EXAMPLES.get(kinds[0], "") if len(set(kinds)) == 1 else ""
        return f"{where} must be {wanted}{example}, {got}"
    return f"{where}: {_short(error.message, quote=False)}"


def _inside_the_fitting_branch(error: jsonschema.ValidationError) -> jsonschema.ValidationError | None:
    """If the value has the type of just one branch, what is wrong inside it; then that is worth more words."""
    branches: dict[Any, list[jsonschema.ValidationError]] = {}
    for sub in error.context or ():
        branches.setdefault(sub.relative_schema_path[0], []).append(sub)
    fitting = [
        errors for errors in branches.values() if not any(e.validator == "type" and not e.relative_path for e in errors)
    ]
    return fitting[0][0] if len(fitting) == 1 else None


def _where(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return f"parameter '{text}'" if text else "the arguments"


def _short(value: Any, limit: int = 60, *, quote: bool = True) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if quote else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
