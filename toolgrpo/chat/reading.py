"""What it takes to read a sampled turn: segments, the reader's seam, and reading a call that is JSON.

A turn arrives as segments: text, and markers of the family. A marker that is one token of the tokenizer is only ever
found by its id, so text that merely looks like it stays text; where it is ordinary text, it is found as text.

Every reader keeps these promises: it never raises; its work grows linearly with the turn; every attempt at a call is
kept, in order, with its text and, if it cannot be used, with what is wrong in words a model can learn from; a call inside
thinking is not a call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.trajectory import AttemptStatus, CallAttempt

__all__ = [
    "Marker",
    "Reader",
    "Segment",
    "as_text",
    "attempt_from",
    "load_json",
    "malformed",
    "read_json_call",
    "unclosed",
]

_DEEPEST = 64  # far beyond any tool's arguments; what nests deeper cannot be recorded or shown
_HALF = "a \\u escape stands for half a character"
_JSON_FORM = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class Marker:
    """A piece of a family's syntax, found in a turn."""

    text: str


Segment = str | Marker


class Reader(Protocol):
    """Takes the turns of one family apart."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The syntax that `read` wants to be told of."""
        ...

    @property
    def thinking(self) -> str | None:
        """How a prompt ends that has already opened the model's thinking; None if the family has no such thing."""
        ...

    def read(self, segments: Iterable[Segment], *, closed: bool, thinking: bool) -> ParsedTurn:
        """One turn without its end-of-turn token; `thinking` says that the prompt opened thinking."""
        ...


def as_text(segments: Iterable[Segment]) -> str:
    """What was written, markers included."""
    return "".join(segment.text if isinstance(segment, Marker) else segment for segment in segments)


def read_json_call(raw: str, *, arguments_key: str = "arguments", form: str = _JSON_FORM) -> CallAttempt:
    """A call that is one JSON object."""
    try:
        call = load_json(raw)
    except (ValueError, RecursionError) as error:
        return malformed(AttemptStatus.INVALID_JSON, raw, f"the call is not valid JSON: {error}; a call is {form}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; a call is {form}")
    arguments = call.get(arguments_key, call.get("arguments", {}))
    return attempt_from(raw, call["name"], {} if arguments is None else arguments)


def attempt_from(raw: str, name: str, arguments: Any) -> CallAttempt:
    """An attempt whose name is known; the arguments are an object, or the JSON text of one."""
    if not _is_unicode(name):
        return malformed(AttemptStatus.INVALID_JSON, raw, _HALF)
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except (ValueError, RecursionError) as error:
            return malformed(AttemptStatus.INVALID_JSON, raw, f"the arguments are not valid JSON: {error}", name)
    if not isinstance(arguments, dict):
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, "arguments must be a JSON object", name)
    if _too_deep(arguments):
        detail = f"the arguments are nested more than {_DEEPEST} levels deep"
        return malformed(AttemptStatus.INVALID_JSON, raw, detail, name)
    if "\\u" in raw.lower() and not _is_unicode(arguments):
        return malformed(AttemptStatus.INVALID_JSON, raw, _HALF, name)
    return CallAttempt(AttemptStatus.OK, raw, name, arguments)


def malformed(status: AttemptStatus, raw: str, detail: str, name: str | None = None) -> CallAttempt:
    return CallAttempt(status, raw, name, detail=detail)


def unclosed(raw: str, closing: str, name: str | None = None) -> CallAttempt:
    return malformed(AttemptStatus.UNCLOSED, raw, f"the call was not closed with {closing}", name)


def load_json(text: str) -> Any:
    """Strict JSON: Python's NaN and Infinity, and numbers too large for a float, have no place in a record."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_constant(digits)


def _is_unicode(value: object) -> bool:
    """Whether it can be written down: JSON can spell half a surrogate pair, which no file or pipe takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(value: object) -> bool:
    level: Sequence[object] = [value]
    for _ in range(_DEEPEST):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
