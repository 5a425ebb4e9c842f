"""What is wrong with arguments, in short sentences that a model can learn from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jsonschema import ValidationError

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
        return {key: _example(properties.get(key), depth + 1) for key in wanted} or {"key": "value"}
    return _EXAMPLES.get(str(kind), "value")


def _inside_the_fitting_branch(error: ValidationError) -> ValidationError | None:
    """Return what is wrong inside the one branch whose type the value has, if it is one."""
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
    text = short(text, 120, quote=False)
    return f"parameter '{text}'" if text else "the arguments"


def short(value: Any, limit: int = 60, *, quote: bool = True) -> str:
    """Return a value as JSON, or as its own text, cut to a limit."""
    text = json.dumps(value, ensure_ascii=False, default=str) if quote else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
