"""Parts for reading a sampled turn: segments, the reader's seam, and attempts with their statuses.

A turn arrives as segments: text, and markers of the family. A marker that is one token of the tokenizer is only ever
found by its id, so text that merely looks like it stays text; where it is ordinary text, it is found as text.

A reader keeps these promises: it never raises; its work grows linearly with the turn; every attempt at a call is kept, in
order, with its text and, if it cannot be used, with what is wrong in words a model can learn from; a call inside thinking
is not a call.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from confined_python import parse_python
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, written

_LONGEST_MENDED = 10_000  # characters
_XML = re.compile(r"\s*<name>\s*([^<>\s]+)\s*</name>\s*<(arguments|parameters)>(.*)</\2>\s*", re.DOTALL)
_DEEPEST = 64  # far beyond any tool's arguments; what nests deeper cannot be recorded or shown
_HALF = "a \\u escape stands for half a character"
_BACKSLASHES = "in a string a backslash is \\\\ and a new line \\n; "
_ODD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\(?![\"'/\\bfnrtu])")  # `\m`: a backslash or a new line was meant


@dataclass(frozen=True, slots=True)
class Marker:
    """A piece of a family's syntax, found in a turn."""

    text: str


Segment = str | Marker
BodyReader = Callable[[str, str, str], list[CallAttempt]]  # of (what was written, the name, the body as guarded text)
BareReader = Callable[[str], "BareCalls | None"]  # of a turn's text


@dataclass(frozen=True, slots=True)
class BareCalls:
    """Calls that stand at the end of a text without markers, and what stands before them."""

    content: str
    attempts: tuple[CallAttempt, ...]


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call as the model's own chat template prints it, beyond what a response template can say of it."""

    text: str  # the whole call, as a model that got it wrong is shown it
    closing: str
    opening: tuple[str, ...] = ()  # texts that begin a call wherever they stand, also inside one that is open
    between: frozenset[str] = frozenset()  # what may stand around the arguments, where a pattern finds each of them
    body: BodyReader | None = None  # for a body that no content parser of transformers reads
    bare: BareReader | None = None  # for calls without markers, in a turn in which nothing else was found


def attempt_from(raw: str, name: str, arguments: Any, call_id: str | None = None) -> CallAttempt:
    """Return an attempt whose name is known; the arguments are an object, or the JSON text of one, or nothing."""
    if not _is_unicode(name):
        return malformed(AttemptStatus.INVALID_JSON, raw, _HALF)
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return malformed(AttemptStatus.INVALID_JSON, raw, f"the arguments are not valid JSON: {error}", name)
    if not isinstance(arguments, dict):
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, "arguments must be a JSON object", name)
    if _too_deep(arguments):
        detail = f"the arguments are nested more than {_DEEPEST} levels deep"
        return malformed(AttemptStatus.INVALID_JSON, raw, detail, name)
    if "\\u" in raw.lower() and not _is_unicode(arguments):
        return malformed(AttemptStatus.INVALID_JSON, raw, _HALF, name)
    return CallAttempt(AttemptStatus.OK, raw, name, arguments, call_id=call_id)


def malformed(status: AttemptStatus, raw: str, detail: str, name: str | None = None) -> CallAttempt:
    return CallAttempt(status, raw, name, detail=detail)


def nameless(raw: str, form: CallForm) -> CallAttempt:
    return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; a call is {form.text}")


def unclosed(raw: str, form: CallForm, name: str | None = None) -> CallAttempt:
    meant = _meant(raw, form)
    shown = "" if meant is None else f"; write it as {written(form.text, meant.name, meant.arguments)}"
    return malformed(AttemptStatus.UNCLOSED, raw, f"the call was not closed with {form.closing}{shown}", name)


def unreadable(raw: str, why: str, form: CallForm, name: str | None = None) -> CallAttempt:
    meant = _meant(raw, form, mend=True)
    shown = f"{_BACKSLASHES if _ODD_ESCAPE.search(raw) else ''}a call is {form.text}"
    if meant is not None:
        shown = f"write it as {written(form.text, meant.name, meant.arguments)}"
    return malformed(AttemptStatus.INVALID_JSON, raw, f"the call cannot be read: {why}; {shown}", name)


def load_json(text: str, *, strict: bool = True) -> Any:
    """Strict JSON: Python's NaN and Infinity, and numbers too large for a float, have no place in a record.

    Not `strict`: strings may run over several lines.
    """
    return json.loads(text, strict=strict, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_constant(digits)


def _is_unicode(value: object) -> bool:
    """Return whether it can be written down: JSON can spell half a surrogate pair, which no file or pipe takes."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(value: object) -> bool:
    level: Sequence[object] = [value]
    for _ in range(_DEEPEST):
        nested = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [child for children in nested for child in children]
        if not level:
            return False
    return True


# Calls as JSON objects, in every spelling that models give them.
#
# `{"name": ..., "arguments": {...}}`, `parameters` for `arguments`, both inside `{"type": "function", "function": {...}}`, the
# name under `function`, and lists of these. What can mean only one thing is read. The rest is an attempt that says what is
# wrong: no call ever runs without arguments that stand in it under another name.

ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "function", "type", "id", "index", "call_id", "tool_call_id", *ARGUMENTS}
_ID = re.compile(r"[A-Za-z0-9]{9}")  # what templates that print ids take


def json_attempts(raw: str, value: Any, form: CallForm) -> list[CallAttempt]:
    """Return the calls that this value stands for, which was read from `raw`: one, or those of a list."""
    inner = value.get("function") if isinstance(value, Mapping) else value
    calls = inner if isinstance(inner, list) else value if isinstance(value, list) else [value]
    return [_attempt(raw, call, form) for call in calls]


def is_call(value: Any) -> bool:
    """Return whether it has the name of a call and, under a name of theirs, arguments."""
    levels = _levels(value)
    return (
        bool(levels) and isinstance(_name(levels[-1]), str) and any(key in one for one in levels for key in ARGUMENTS)
    )


def _levels(value: Any) -> list[Mapping[str, Any]]:
    """Return an object and what stands under its `function`, twice at most; the last holds the name."""
    levels: list[Mapping[str, Any]] = []
    while isinstance(value, Mapping) and len(levels) < 3:
        levels.append(value)
        value = None if "name" in value else value.get("function")
    return levels


def _name(level: Mapping[str, Any]) -> Any:
    return level["name"] if "name" in level else level.get("function")


def _attempt(raw: str, call: Any, form: CallForm) -> CallAttempt:
    levels = _levels(call)
    name = _name(levels[-1]) if levels else None
    if not isinstance(name, str) or not name:
        return nameless(raw, form)
    function = levels[-1]
    given = [one[key] for one in levels for key in ARGUMENTS if one.get(key) is not None]
    if any(one != given[0] for one in given[1:]):
        detail = f"the call has arguments in two places, and they differ; a call is {form.text}"
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, detail, name)
    others = [key for key in function if key not in _BESIDE]
    if others and all(one in ({}, "{}", "") for one in given):
        meant = attempt_from(raw, name, {key: function[key] for key in others})
        shown = f"a call is {form.text}"
        if meant.arguments:
            shown = f"write it as {written(form.text, meant.name, meant.arguments)}"
        lack = "the arguments of the call are empty" if given else "the call has no arguments"
        detail = f"{lack}, but {others[0][:60]!r} stands beside its name; {shown}"
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, detail, name)
    number = call.get("id", function.get("id"))
    number = number if isinstance(number, str) and _ID.fullmatch(number) else None
    attempt = attempt_from(raw, name, given[0] if given else {}, number)
    if attempt.status is AttemptStatus.OK:
        json.dumps(attempt.arguments, allow_nan=False)  # transformers' JSON takes NaN, which is a ValueError here
    return attempt


# What a broken call meant: it is shown in the right form, and not run.


def _meant(text: str, form: CallForm, *, mend: bool = False) -> CallAttempt | None:
    """Return the call that this text means, in a code fence or not, for a form that elides name and arguments.

    `mend`: brackets left open or closed twice, a comma too many, Python's spelling. Not where a call may have been cut.
    """
    if len(text) > _LONGEST_MENDED or written(form.text, "", {}) == form.text or _ODD_ESCAPE.search(text):
        return None
    text = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    closed = _closed(text) if mend else text
    loose, python = partial(load_json, strict=False), lambda text: ast.literal_eval(parse_python(text, "eval"))
    readers: tuple[Callable[[str], Any], ...] = (loose, python)
    for read in readers:
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = read(closed)
            if is_call(value):
                (meant,) = json_attempts(text, value, form)
                return meant if meant.status is AttemptStatus.OK else None
    return None


def _closed(text: str) -> str:
    """Return JSON with its brackets balanced and no comma before a closing one."""
    said: list[str] = []
    open_ones, quote, escaped = "", "", False
    for letter in text:
        if quote:
            quote = "" if letter == quote and not escaped else quote
            escaped = letter == "\\" and not escaped
        elif letter in "\"'":
            quote = letter
        elif letter in "{[":
            open_ones += "}" if letter == "{" else "]"
        elif letter in "}]":
            if not open_ones.endswith(letter):
                continue
            open_ones = open_ones[:-1]
            while said and (said[-1].isspace() or said[-1] == ","):
                said.pop()
        said.append(letter)
    return "".join(said).rstrip(", \n") + open_ones[::-1]


def xml_attempt(raw: str, form: CallForm) -> CallAttempt:
    """Return a call in XML tags, with its arguments if they can be read: `<name>f</name><arguments>{...}</arguments>`."""
    found = _XML.fullmatch(raw)
    read = None if found is None else attempt_from(raw, found[1], found[3].strip())
    said = "what stands in the call are XML tags, and a call is JSON"
    if read is None or read.status is not AttemptStatus.OK:
        return malformed(AttemptStatus.XML, raw, f"{said}: {form.text}", None if found is None else found[1])
    return replace(
        read, status=AttemptStatus.XML, detail=f"{said}; write it as {written(form.text, read.name, read.arguments)}"
    )
