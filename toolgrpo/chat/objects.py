"""Calls as JSON objects, in every spelling that models give them.

`{"name": ..., "arguments": {...}}`, `parameters` for `arguments`, both inside `{"type": "function", "function": {...}}`, the
name under `function`, and lists of these. What can mean only one thing is read. The rest is an attempt that says what is
wrong: no call ever runs without arguments that stand in it under another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from toolgrpo.calls import AttemptStatus, CallAttempt
from toolgrpo.chat.attempts import CallForm, attempt_from, malformed, nameless

ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "function", "type", "id", *ARGUMENTS}
_ID = re.compile(r"[A-Za-z0-9]{9}")  # what templates that print ids take


def json_attempts(raw: str, value: Any, form: CallForm) -> list[CallAttempt]:
    """Return the calls that this value stands for, which was read from `raw`: one, or those of a list."""
    inner = value.get("function") if isinstance(value, Mapping) else value
    calls = inner if isinstance(inner, list) else value if isinstance(value, list) else [value]
    return [_attempt(raw, call, form) for call in calls]


def is_call(value: Any) -> bool:
    """Return whether it has the name of a call and, under a name of theirs, arguments."""
    function = _function(value)
    return function is not None and isinstance(function.get("name"), str) and any(key in function for key in ARGUMENTS)


def _function(value: Any) -> Mapping[str, Any] | None:
    """Return what holds the name: the object itself, or what stands under its `function`, twice at most."""
    for _ in range(2):
        inner = value.get("function") if isinstance(value, Mapping) and "name" not in value else None
        if isinstance(inner, str):
            return {**value, "name": inner}
        value = inner if isinstance(inner, Mapping) else value
    return value if isinstance(value, Mapping) else None


def _attempt(raw: str, call: Any, form: CallForm) -> CallAttempt:
    function = _function(call)
    name = None if function is None else function.get("name")
    if function is None or not isinstance(name, str) or not name:
        return nameless(raw, form)
    given = [function[key] for key in ARGUMENTS if function.get(key) is not None]
    if len(given) == 2 and given[0] != given[1]:
        detail = f"the call has both arguments and parameters; a call is {form.text}"
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, detail, name)
    others = [key for key in function if key not in _BESIDE]
    if not given and others:
        detail = f"the call has no arguments, but {others[0][:60]!r} beside its name; a call is {form.text}"
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, detail, name)
    number = call.get("id", function.get("id"))
    number = number if isinstance(number, str) and _ID.fullmatch(number) else None
    attempt = attempt_from(raw, name, given[0] if given else {}, number)
    if attempt.status is AttemptStatus.OK:
        json.dumps(attempt.arguments, allow_nan=False)  # transformers' JSON takes NaN, which is a ValueError here
    return attempt
