"""Arguments that a model wrote, checked against a tool's schema, in words the model can learn from.

Coerced is only what loses nothing: "3" for an integer, 3.0 for an integer, "true" for a boolean, 7 for a string, a list
or object that was written as JSON text. "abc" never becomes a number and 3.5 never an integer.

Nothing that a model writes raises here or takes long: what is nested too deeply or has too many digits is refused before
anything walks it, coercion takes one step a value, and a check has a bound of processor time.
Not covered: what only the tool's own types can check (a pydantic validator, say); the worker does that.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jsonschema import ValidationError

from toolgrpo.tools.bounds import MAX_DIGITS, beyond_bounds, read_json
from toolgrpo.tools.render import describe_exception
from toolgrpo.tools.validation import SchemaValidator

__all__ = ["ArgumentChecker", "Checked", "nearest", "signature_text"]

_MAX_COMPLAINTS = 3
_MAX_USAGE_CHARS = 500
_INTEGER = re.compile(rf"[+-]?\d{{1,{MAX_DIGITS}}}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
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
_EXAMPLES = {"integer": " like 3", "number": " like 2.5", "array": " like [1, 2]", "object": ' like {"key": "value"}'}


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments as the tool will get them, or what is wrong with them."""

    arguments: dict[str, Any]
    complaint: str | None = None


class ArgumentChecker:
    """Checks the arguments of one tool; made once from its schema, which raises PluginError if that cannot be used."""

    def __init__(self, name: str, parameters: Mapping[str, Any], where: str | None = None) -> None:
        self._name = name
        self._validator = SchemaValidator(parameters, where or f"tool '{name}'")
        self._schema = self._validator.schema
        self._open = bool(parameters.get("additionalProperties", False)) or "patternProperties" in parameters
        self._usage = signature_text(name, parameters)

    def check(self, arguments: Mapping[str, Any]) -> Checked:
        """Coerce what loses nothing, then complain about the rest."""
        properties = self._schema.get("properties", {})
        try:
            beyond = beyond_bounds(arguments)
            known = {} if beyond else {key: _coerce(value, properties.get(key)) for key, value in arguments.items()}
            if (beyond := beyond or beyond_bounds(known)) is not None:  # text that was read may nest deeper than it did
                return self._refused(f"the arguments cannot be used: {beyond}")
            unknown = [] if self._open else [key for key in known if key not in properties]
            errors = self._validator.errors(known)
            if not unknown and not errors:
                return Checked(known)
            complaints = [self._unknown(key, properties) for key in unknown[:_MAX_COMPLAINTS]]
            complaints += [_complain(error) for error in errors[: _MAX_COMPLAINTS - len(complaints)]]
        except TimeoutError:
            return self._refused("the arguments take too long to check; write them shorter and simpler")
        except Exception as error:  # a validator meets values nobody thought of; none of them may end a run
            return self._refused(f"the arguments cannot be checked ({describe_exception(error, 200)})")
        more = len(unknown) + len(errors) - len(complaints)
        rest = f"; and {more} more" if more > 0 else ""
        return self._refused("; ".join(dict.fromkeys(complaints)) + rest)

    def _refused(self, complaint: str) -> Checked:
        return Checked({}, f"{self._name}: {complaint}. Usage: {self._usage}")

    def _unknown(self, key: str, properties: Mapping[str, Any]) -> str:
        close = nearest(key, properties)
        hint = f", did you mean {close}?" if close else ""
        return f"unknown parameter '{_short(key, quote=False)}'{hint}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The nearest known names, quoted and joined with "or"; empty if none is near."""
    by_fold = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower()[:100], list(by_fold), n=2, cutoff=0.6)
    return " or ".join(f"'{by_fold[name]}'" for name in close)


def signature_text(name: str, parameters: Mapping[str, Any]) -> str:
    """`add(a: integer, b: integer = optional)`: how to call the tool, in one line."""
    required = set(parameters.get("required", ()))
    parts = [
        f"{key}: {_type_text(sub)}" + ("" if key in required else " (optional)")
        for key, sub in parameters.get("properties", {}).items()
    ]
    return _short(f"{name}({', '.join(parts)})", _MAX_USAGE_CHARS, quote=False)


def _type_text(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
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


def _kinds(schema: Any) -> list[str]:
    """The JSON types a schema allows, as far as it says."""
    if not isinstance(schema, Mapping):
        return []
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
        with suppress(ValueError):
            return read_json(stripped)
    return text


def _complain(error: ValidationError) -> str:
    """One validation error in a short sentence."""
    where = _where(error.absolute_path)
    kinds = _kinds(error.schema)
    got = f"got {_short(error.instance)}"
    rule: Any = error.validator_value
    if error.validator == "required":
        instance: Any = error.instance
        missing = [name for name in rule if name not in instance]
        names = _short(", ".join(f"'{name}'" for name in missing), 200, quote=False)
        inside = f"{where}: " if error.absolute_path else ""
        return f"{inside}missing {'parameter' if not inside else 'key'}{'s' if len(missing) > 1 else ''} {names}"
    if error.validator in ("enum", "const"):
        allowed = rule if error.validator == "enum" else [rule]
        return f"{where} must be one of {', '.join(_short(v) for v in allowed[:20])}; {got}"
    if error.validator in _RULES:
        return f"{where} must {_RULES[error.validator]} {_short(rule, quote=False)}, {got}"
    if error.validator == "anyOf" and (inner := _inside_the_fitting_branch(error)) is not None:
        return _complain(inner)
    if error.validator in ("type", "anyOf") and kinds:
        wanted = " or ".join(dict.fromkeys(_ARTICLES.get(kind, kind) for kind in kinds))
        example = _EXAMPLES.get(kinds[0], "") if len(set(kinds)) == 1 else ""
        return f"{where} must be {wanted}{example}, {got}"
    return f"{where}: {_short(error.message, quote=False)}"


def _inside_the_fitting_branch(error: ValidationError) -> ValidationError | None:
    """If the value has the type of just one branch, what is wrong inside it; then that is worth more words."""
    branches: dict[Any, list[ValidationError]] = {}
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
    text = _short(text, 120, quote=False)
    return f"parameter '{text}'" if text else "the arguments"


def _short(value: Any, limit: int = 60, *, quote: bool = True) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if quote else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
