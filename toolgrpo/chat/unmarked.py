"""Calls without their markers: a model that knows tools, but was trained to mark calls otherwise or not at all.

Such a turn would end its episode as an answer, and nobody would know why no tool is ever called. So a turn without a marked
call is looked at once more. A call without markers is: one JSON object with the name of an offered tool and arguments that
fit its schema, alone in a code fence or beginning a line, with nothing behind it and no second one before it. A call that
was made already is quoted, not made. Anything else is an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolgrpo.chat.attempts import CallForm, is_call, json_attempts, load_json
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.call_bodies import objects_at_end
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, written
from toolgrpo.episode.trajectory import Turn
from toolgrpo.tools.arguments import ArgumentChecker

_FENCE = re.compile(r"^[^\S\n]*```[^\n]*$", re.MULTILINE)
_NAMED = re.compile(r'\{[^{}"]*"(?:name|function|type|arguments|parameters)"\s*:')
_NO_FORM = CallForm("", "")


def calls_made(turns: Iterable[Turn]) -> list[CallAttempt]:
    """Return the calls of these turns that were written with their markers: one that comes again without them is quoted."""
    return [attempt for turn in turns for attempt in turn.attempts if attempt.status is AttemptStatus.OK]


def with_unmarked(
    parsed: ParsedTurn, schemas: Sequence[Mapping[str, Any]], *, form: str | None, made: Iterable[CallAttempt] = ()
) -> ParsedTurn:
    """Return a turn with the call that stands in it without markers, if one does; accepted, one in XML tags too."""
    if form is None and any(attempt.status is AttemptStatus.XML for attempt in parsed.attempts):
        return replace(parsed, attempts=tuple(map(_accepted, parsed.attempts)))
    if parsed.attempts or not parsed.closed:
        return parsed
    found = unmarked_call(parsed.content, schemas, form=form, made=made)
    return parsed if found is None else replace(parsed, attempts=(found,))


def unmarked_call(
    text: str, schemas: Sequence[Mapping[str, Any]], *, form: str | None, made: Iterable[CallAttempt] = ()
) -> CallAttempt | None:
    """Return the call that stands in this text without markers, if one does.

    `form` is a call as it should be, which the model is told; with None it is accepted as it stands. `made` are the calls
    of the turns before.
    """
    if "{" not in text:
        return None
    found = _object_in(text)
    if found is None:
        return None
    raw, value, before = found
    if not is_call(value) or _NAMED.search(before):
        return None
    try:
        (read,) = json_attempts(raw, value, _NO_FORM)
    except ValueError:  # no single call, or one with a number that JSON has not
        return None
    if read.status is not AttemptStatus.OK or not _fits(read, schemas):
        return None
    if any((call.name, call.arguments) == (read.name, read.arguments) for call in made):
        return None
    if form is None:
        return CallAttempt(AttemptStatus.ACCEPTED, raw, read.name, read.arguments)
    detail = f"the call was not run, because it does not stand in the form of a call. Write it as {written(form, read.name, read.arguments)}"
    return CallAttempt(AttemptStatus.UNMARKED, raw, read.name, read.arguments, detail)


def _accepted(attempt: CallAttempt) -> CallAttempt:
    """Return a call in XML tags as one that is run, if its arguments could be read."""
    if attempt.status is not AttemptStatus.XML or attempt.arguments is None:
        return attempt
    return replace(attempt, status=AttemptStatus.ACCEPTED, detail="")


def _object_in(text: str) -> tuple[str, Any, str] | None:
    """Return what was written, the object, and the text before it."""
    fences = list(_FENCE.finditer(text))
    if not fences:
        found = objects_at_end(text)
        if found is None or len(found.values) != 1:
            return None
        return text[found.start :].strip(), found.values[0], text[: found.start]
    if len(fences) != 2 or text[fences[1].end() :].strip():
        return None
    raw = text[fences[0].end() : fences[1].start()].strip()
    if not raw.startswith("{"):
        return None
    try:
        return raw, load_json(raw), text[: fences[0].start()]
    except (ValueError, RecursionError):
        return None


def _fits(call: CallAttempt, schemas: Sequence[Mapping[str, Any]]) -> bool:
    functions = (schema.get("function", schema) for schema in schemas)
    offered = next((function for function in functions if function.get("name") == call.name), None)
    if offered is None:
        return False
    checker = ArgumentChecker(str(call.name), offered.get("parameters") or {})
    return checker.check(call.arguments or {}).complaint is None
