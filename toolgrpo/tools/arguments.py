"""Arguments that a model wrote, checked against a tool's schema, in words the model can learn from.

Nothing that a model writes raises here or takes long: what is nested too deeply or has too many
digits is refused before anything walks it (`bounds.py`), coercion takes one step per value
(`coercion.py`), and a check has a bound of processor time (`validation.py`).
Not covered: what only the tool's own types can check (a pydantic validator, say); the worker does
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolgrpo.nearest import nearest
from toolgrpo.tools.bounds import beyond_bounds
from toolgrpo.tools.coercion import Coercer
from toolgrpo.tools.complaints import complaint_of, short
from toolgrpo.tools.render import describe_exception
from toolgrpo.tools.validation import SchemaValidator

_MAX_COMPLAINTS = 3
_MAX_USAGE_CHARS = 500
_MAX_SIGNATURES = 24
_ONE_LINE_CHARS = 240  # signatures that are longer together stand on a line each


@dataclass(frozen=True, slots=True)
class Checked:
    """Arguments as the tool will get them, or what is wrong with them."""

    arguments: dict[str, Any]
    complaint: str | None = None


class ArgumentChecker:
    """Checks the arguments of one tool; making it raises PluginError for an unusable schema."""

    def __init__(
        self, name: str, parameters: Mapping[str, Any], where: str | None = None, *, unchecked: bool = False
    ) -> None:
        """`unchecked`: only what could harm is refused, and nothing is made to fit the schema."""
        self._name = name
        self._unchecked = unchecked
        self._validator = SchemaValidator(parameters, where or f"tool '{name}'")
        self._schema = self._validator.schema
        self._coercer = Coercer(self._schema)
        self._open = bool(parameters.get("additionalProperties", False)) or "patternProperties" in parameters
        self._usage = signature_text(name, parameters)

    def check(self, arguments: Mapping[str, Any]) -> Checked:
        """Coerce what loses nothing, then complain about the rest."""
        properties = self._schema.get("properties", {})
        try:
            beyond = beyond_bounds(arguments)
            known = (
                {}
                if beyond
                else dict(arguments)
                if self._unchecked
                else {key: self._coercer.coerced(value, properties.get(key)) for key, value in arguments.items()}
            )
            if (beyond := beyond or beyond_bounds(known)) is not None:  # text that was read may nest deeper than it did
                return self._refused(f"the arguments cannot be used: {beyond}")
            if self._unchecked:
                return Checked(known)
            unknown = [] if self._open else [key for key in known if key not in properties]
            errors = self._validator.errors(known)
            if not unknown and not errors:
                return Checked(known)
            complaints = [self._unknown(key, properties) for key in unknown[:_MAX_COMPLAINTS]]
            complaints += [
                complaint_of(error, self._coercer.kinds) for error in errors[: _MAX_COMPLAINTS - len(complaints)]
            ]
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
        close = names_near(key, properties)
        hint = f", did you mean {close}?" if close else ""
        return f"unknown parameter '{short(key, quote=False)}'{hint}"


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
