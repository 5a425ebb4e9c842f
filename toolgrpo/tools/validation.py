"""A tool's JSON schema as a validator that nobody can make fetch, recurse for ever or stall.

Schemas come from MCP servers and from users, so each is checked when the tool is loaded: its size
and depth, its form against the metaschema, that every reference leads to a place in the schema
itself (or to a metaschema; nothing is ever retrieved), that following references comes to an end,
and that its patterns can be read. Values come from models, so one check has a bound of processor
time, that its patterns share.

`nullable: true` (the form chat templates know for Optional) is understood as "or null".
Not covered: `format`, `unevaluatedProperties` and `unevaluatedItems`, which the tool may check
itself.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import jsonschema
import referencing.exceptions
import regex  # type: ignore[import-untyped]  # it ships no types; transformers compiles its patterns with it
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, ValidationError
from jsonschema_specifications import REGISTRY as METASCHEMAS  # type: ignore[import-untyped]  # it ships no types
from referencing import Resource, Specification
from referencing.jsonschema import DRAFT7, DRAFT202012
from referencing.jsonschema import EMPTY_REGISTRY as NOTHING_RETRIEVED

from toolgrpo.errors import PluginError
from toolgrpo.support.regex_budget import RegexBudget
from toolgrpo.tools.bounds import beyond_bounds

_MAX_CHARS = 200_000
_MAX_CHAIN = 64  # references and alternatives that are followed for one value
_LIMIT_S = 0.5  # most checks need a thousandth of it
_SHORT_CHARS = 10_000
_NAME_TO_SCHEMA = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]

_budget: ContextVar[RegexBudget] = ContextVar("regex_budget")


class SchemaValidator:
    """Checks values against one schema; PluginError, beginning with `where`, if it is unusable."""

    def __init__(self, parameters: Mapping[str, Any], where: str, *, closed: bool = False) -> None:
        """`closed`: no object in it takes keys that it does not name; of the arguments themselves that holds anyhow."""
        _check_size(parameters, where)
        self.schema: Mapping[str, Any] = _with_null(parameters)
        if closed:
            self.schema = _closed(self.schema)
        named_elsewhere = "additionalProperties" not in self.schema and any(
            map(_names_keys, _alternatives(self.schema))
        )
        closes = self.schema.get("additionalProperties") in (None, False) and "patternProperties" not in self.schema
        if closes and not named_elsewhere:
            self.schema = {**self.schema, "additionalProperties": False}
        if self.schema.get("type", "object") != "object" or not isinstance(self.schema.get("properties", {}), Mapping):
            raise PluginError(
                f"{where}: the schema of its arguments must describe an object: "
                '{"type": "object", "properties": {...}, "required": [...]}'
            )
        bounded, specification = _dialect(self.schema, where)
        _check_references(self.schema, specification, where)
        self._validator = bounded(self.schema, registry=NOTHING_RETRIEVED)

    def errors(self, value: object) -> list[ValidationError]:
        """Return what is wrong with a value; TimeoutError when the check takes too long.

        A short value is tried twice: a garbage collection may have taken the time of the first.
        """
        try:
            return self._errors(value)
        except TimeoutError:
            if len(str(value)) > _SHORT_CHARS:
                raise
            return self._errors(value)

    def _errors(self, value: object) -> list[ValidationError]:
        used = _budget.set(RegexBudget(_LIMIT_S))
        try:
            return list(self._validator.iter_errors(value))
        finally:
            _budget.reset(used)


def _names_keys(schema: object) -> bool:
    """Return whether a schema that looks at the arguments beside the first one may name some, too."""
    if not isinstance(schema, Mapping):
        return False
    names = ("properties", "patternProperties", "additionalProperties", "$ref", "$dynamicRef")
    return any(name in schema for name in names) or any(map(_names_keys, _alternatives(schema)))


def _check_size(schema: object, where: str) -> None:
    """Refuse what is too deep to walk, too large to show to a model, or no JSON."""
    if (beyond := beyond_bounds(schema)) is not None:
        raise PluginError(f"{where}: its schema cannot be used: {beyond}")
    try:
        chars = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where}: its schema is not plain JSON: {error}") from error
    if chars > _MAX_CHARS:
        raise PluginError(
            f"{where}: its schema has {chars:,} characters, and every prompt would hold them; at most {_MAX_CHARS:,}"
        )


def _with_null(schema: Any) -> Any:
    """Return the schema with `nullable: true` written as JSON Schema knows it."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {
        key: (
            {name: _with_null(sub) for name, sub in value.items()}  # any of the names may be "nullable"
            if key in _NAME_TO_SCHEMA and isinstance(value, Mapping)
            else value
            if key in _VALUES
            else _with_null(value)
        )
        for key, value in schema.items()
        if key != "nullable"
    }
    return {"anyOf": [result, {"type": "null"}]} if schema.get("nullable") is True else result


def _closed(schema: Any) -> Any:
    """Return the schema with the objects that name their keys closed to others, unless they say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {
        key: _closed(schema[key]) for key in ("anyOf", "items", "prefixItems", "additionalProperties") if key in schema
    }
    if not schema.get("properties"):
        return {**schema, **inner}
    properties = {name: _closed(sub) for name, sub in schema["properties"].items()}
    return {"additionalProperties": False, **schema, **inner, "properties": properties}


def _dialect(schema: Mapping[str, Any], where: str) -> tuple[Any, Specification[Any]]:
    """Return the validator of the schema's dialect: the newest if that will do, else draft 7."""
    no_formats = FormatChecker(())  # patterns are read below, as `regex` knows them: \\p{L} is none for `re`
    try:
        Draft202012Validator.check_schema(schema, format_checker=no_formats)
    except jsonschema.SchemaError as error:
        try:
            Draft7Validator.check_schema(schema, format_checker=no_formats)
        except jsonschema.SchemaError:
            place = "".join(f"/{part}" for part in error.absolute_path)
            raise PluginError(f"{where}: its schema is not valid at '{place[:200]}': {error.message[:300]}") from error
        return _BOUNDED_7, DRAFT7
    return _BOUNDED_2020, DRAFT202012


def _check_references(schema: Mapping[str, Any], specification: Specification[Any], where: str) -> None:
    """Follow every reference once; refuse one that leads nowhere, out of it, or in a circle."""
    root: Resource[Any] = specification.create_resource(schema)
    resolver = METASCHEMAS.resolver_with_root(root)
    in_place: dict[int, list[object]] = {}
    pending: list[tuple[Any, Any]] = [(schema, resolver)]
    while pending:
        node, resolver = pending.pop()
        if not isinstance(node, Mapping) or id(node) in in_place:
            continue
        resource = specification.create_resource(node)
        resolver = resolver.in_subresource(resource)
        targets = [_target(node[key], resolver, where) for key in ("$ref", "$dynamicRef") if key in node]
        for pattern in [*node.get("patternProperties", ()), *([node["pattern"]] if "pattern" in node else ())]:
            _check_pattern(pattern, where)
        in_place[id(node)] = [target.contents for target in targets] + _alternatives(node)
        pending += [(target.contents, target.resolver) for target in targets]
        pending += [(sub.contents, resolver) for sub in resource.subresources()]
    _check_ends(in_place, where)


def _target(reference: str, resolver: Any, where: str) -> Any:
    try:
        found = resolver.lookup(reference)
    except referencing.exceptions.Unresolvable as error:
        raise PluginError(
            f"{where}: its schema refers to {reference[:200]!r}, which is not in the schema. Nothing is fetched from "
            'elsewhere: put its definition under "$defs" of the same schema.'
        ) from error
    if not isinstance(found.contents, Mapping | bool):
        raise PluginError(f"{where}: its schema refers to {reference[:200]!r}, which is not a schema")
    return found


def _alternatives(node: Mapping[str, Any]) -> list[object]:
    """Return the subschemas that look at the very value that this schema looks at."""
    found = [member for key in ("allOf", "anyOf", "oneOf") for member in node.get(key, ())]
    found += [node[key] for key in ("not", "if", "then", "else") if key in node]
    for key in ("dependentSchemas", "dependencies"):
        found += [sub for sub in node.get(key, {}).values() if isinstance(sub, Mapping)]
    return found


def _check_ends(in_place: Mapping[int, list[object]], where: str) -> None:
    """Refuse a schema that would look at one value for ever: recursion must go into the value."""
    lengths: dict[int, int] = {}
    above: list[int] = []

    def length(node: int) -> int:
        if node not in lengths:
            if node in above or len(above) >= _MAX_CHAIN:
                raise PluginError(
                    f"{where}: its schema refers to itself without going into the value, or through more than "
                    f"{_MAX_CHAIN} references at one place, so that checking a value would not end"
                )
            above.append(node)
            lengths[node] = 1 + max((length(id(sub)) for sub in in_place[node] if id(sub) in in_place), default=0)
            above.pop()
        return lengths[node]

    if max(map(length, in_place), default=0) > _MAX_CHAIN:
        raise PluginError(f"{where}: its schema follows more than {_MAX_CHAIN} references at one place. Flatten it.")


def _check_pattern(pattern: str, where: str) -> None:
    try:
        _compiled(pattern)
    except Exception as error:  # regex raises errors of its own, RecursionError and OverflowError
        raise PluginError(f"{where}: the pattern {pattern[:200]!r} of its schema cannot be read: {error}") from error


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def _found(pattern: str, text: str) -> bool:
    compiled = _compiled(pattern)
    found = _budget.get().spend(lambda left_s: compiled.search(text, timeout=left_s))
    return found is not None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _found(pattern, instance):
        yield ValidationError(f"it does not match the pattern {pattern}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, sub in patterns.items():
            for key, value in instance.items():
                if _found(pattern, key):
                    yield from validator.descend(value, sub, path=key, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, value in instance.items():
        if key in named or any(_found(pattern, key) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError("it is not allowed", path=[key])
        else:
            yield from validator.descend(value, allowed, path=key)


def _unique_items(validator: Any, unique: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if unique and isinstance(instance, list) and len({_hashable(item) for item in instance}) < len(instance):
        yield ValidationError("an item is there twice")


def _hashable(value: object) -> object:
    """Return a key that is equal for equal JSON values; 1 equals 1.0 there, but not true."""
    if isinstance(value, dict):
        return "object", frozenset((key, _hashable(member)) for key, member in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_hashable, value))
    return (type(value) is bool, value)


def _unchecked(validator: Any, rule: Any, instance: Any, schema: Any) -> None:
    """Leave it to the tool: the library would match patterns here without a bound."""


def _bounded(base: Any) -> Any:
    """Return a validator class whose keywords all spend from the allowance, patterns too."""
    ours: dict[str, Keyword] = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique_items,
        "multipleOf": _multiple_of,
        "unevaluatedItems": _unchecked,
        "unevaluatedProperties": _unchecked,
    }
    keywords = {name: _counted(ours.get(name, keyword)) for name, keyword in base.VALIDATORS.items()}
    return jsonschema.validators.extend(base, validators=keywords)  # type: ignore[no-untyped-call]  # nor does this


def _multiple_of(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Take 19.99 for a multiple of 0.01, which as floats it is not."""
    if not validator.is_type(instance, "number") or not rule:
        return
    if isinstance(instance, int) and isinstance(rule, int):
        exact = instance % rule == 0
    else:
        times = instance / rule
        rounded = 4 * sys.float_info.epsilon * max(1.0, abs(times))
        exact = math.isfinite(times) and abs(times - round(times)) <= rounded
    if not exact:
        yield ValidationError(f"{instance!r} is not a multiple of {rule}")


def _counted(keyword: Keyword) -> Keyword:
    def within_budget(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        _budget.get().spend(lambda left_s: None)
        yield from keyword(validator, rule, instance, schema) or ()

    return within_budget


_BOUNDED_7 = _bounded(Draft7Validator)
_BOUNDED_2020 = _bounded(Draft202012Validator)
