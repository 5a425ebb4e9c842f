"""A tool call as a model or a test writes it, text or object, as a `CallAttempt`. Never raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolgrpo.calls import AttemptStatus, CallAttempt
from toolgrpo.tools.bounds import read_json

_FORM = '{"name": "...", "arguments": {...}}'


def parse_call(call: object) -> CallAttempt:
    """Read a call, `{"name": ..., "arguments": {...}}`, as text or object.

    The OpenAI form with a `function` inside is understood too.
    """
    if isinstance(call, CallAttempt):
        return call
    raw = call if isinstance(call, str) else _written(call)
    if isinstance(call, str):
        try:
            call = read_json(call)
        except ValueError as error:
            return _bad(AttemptStatus.INVALID_JSON, raw, f"this is not valid JSON ({error}). Write {_FORM}")
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        call = call["function"]
    if not isinstance(call, Mapping):
        return _bad(AttemptStatus.INVALID_JSON, raw, f"a tool call must be an object, got {_kind(call)}. Write {_FORM}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return _bad(AttemptStatus.MISSING_NAME, raw, f'the tool call has no "name". Write {_FORM}')
    arguments: Any = call.get("arguments", {})
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return _bad(AttemptStatus.INVALID_JSON, raw, f'the "arguments" are not valid JSON ({error})', name)
    if not isinstance(arguments, Mapping):
        detail = f'"arguments" must be an object like {{"key": value}}, got {_kind(arguments)}'
        return _bad(AttemptStatus.BAD_ARGUMENTS, raw, detail, name)
    return CallAttempt(AttemptStatus.OK, raw, name, {str(key): value for key, value in arguments.items()})


def _bad(status: AttemptStatus, raw: str, detail: str, name: str | None = None) -> CallAttempt:
    return CallAttempt(status, raw, name, None, detail)


def _written(call: object) -> str:
    try:
        return repr(call)
    except (RecursionError, ValueError) as error:  # nested without end; an integer with too many digits
        return f"({type(call).__name__} that cannot be shown: {error})"


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
