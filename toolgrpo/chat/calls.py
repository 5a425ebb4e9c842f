"""From text and markers to a parsed turn: reasoning, content and every attempt at a call, in order.

Never raises. A call inside `<think>` is not a call. What cannot be read keeps its text, and says what is wrong with it in
words a model can learn from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.trajectory import AttemptStatus, CallAttempt

__all__ = ["Marker", "read_call", "read_turn"]

_DEEPEST = 64  # far beyond any tool's arguments; what nests deeper cannot be recorded or shown
_FORM = 'a call is {"name": ..., "arguments": {...}}'


class Marker(Enum):
    CALL = "<tool_call>"
    CALL_END = "</tool_call>"
    THINK = "<think>"
    THINK_END = "</think>"


def read_turn(segments: Iterable[str | Marker], *, closed: bool) -> ParsedTurn:
    """Take one turn apart."""
    thoughts: list[str] | None = None
    content: list[str] = []
    call: list[str] | None = None
    attempts: list[CallAttempt] = []
    thinking = False
    for segment in segments:
        if segment is Marker.THINK and call is None and not thinking:
            thoughts, thinking = thoughts or [], True
        elif segment is Marker.THINK_END and call is None and (thinking or thoughts is None):
            # Without an opening, the prompt opened it: all that was said so far was thinking.
            if thoughts is None:
                thoughts, content, attempts = content, [], []
            thinking = False
        elif thinking:
            assert thoughts is not None
            thoughts.append(_text(segment))
        elif segment is Marker.CALL:
            if call is not None:
                attempts.append(_unclosed("".join(call)))
            call = []
        elif segment is Marker.CALL_END and call is not None:
            attempts.append(read_call("".join(call)))
            call = None
        else:
            (content if call is None else call).append(_text(segment))
    if call is not None:
        attempts.append(_unclosed("".join(call)))
    said = "".join(content)
    if attempts or thoughts is not None:
        said = said.strip("\n")
    reasoning = None if thoughts is None else "".join(thoughts).strip("\n")
    return ParsedTurn(said, reasoning, tuple(attempts), closed)


def read_call(raw: str) -> CallAttempt:
    """One call between its markers."""
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return CallAttempt(AttemptStatus.INVALID_JSON, raw, detail=f"the call is not valid JSON: {error}; {_FORM}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return CallAttempt(AttemptStatus.MISSING_NAME, raw, detail=f"the call has no name; {_FORM}")
    name, arguments = call["name"], call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            detail = f"the arguments are not valid JSON: {error}"
            return CallAttempt(AttemptStatus.INVALID_JSON, raw, name, detail=detail)
    if not isinstance(arguments, dict):
        return CallAttempt(AttemptStatus.BAD_ARGUMENTS, raw, name, detail="arguments must be a JSON object")
    if _too_deep(arguments):
        detail = f"the arguments are nested more than {_DEEPEST} levels deep"
        return CallAttempt(AttemptStatus.INVALID_JSON, raw, name, detail=detail)
    return CallAttempt(AttemptStatus.OK, raw, name, arguments)


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _unclosed(raw: str) -> CallAttempt:
    return CallAttempt(AttemptStatus.UNCLOSED, raw, detail=f"the call was not closed with {Marker.CALL_END.value}")


def _text(segment: str | Marker) -> str:
    return segment.value if isinstance(segment, Marker) else segment
