"""Values brought into the type that a schema wants, where that loses nothing.

"3" for an integer, 3.0 for an integer, "true" for a boolean, 7 for a string, a list or object that
was written as JSON text. "abc" never becomes a number and 3.5 never an integer. Each value is
looked at once, whatever the schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from toolgrpo.tools.bounds import MAX_DIGITS, read_json

_INTEGER = re.compile(rf"[+-]?\d{{1,{MAX_DIGITS}}}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")


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
                kind = schema.get("type", ())
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
            items = schema.get("items")
            return [self.coerced(item, items) for item in value] if isinstance(items, Mapping) else value
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
