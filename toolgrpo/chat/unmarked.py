"""Calls without markers.

* A model that knows tools may have been trained to mark calls otherwise or not at all. Such a turn would end its episode as
  an answer, and nobody would know why no tool is ever called. So a turn without a marked call is looked at once more
  (`unmarked_call`). A call without markers is: one JSON object with the name of an offered tool and arguments that fit its
  schema, alone in a code fence or beginning a line, with nothing behind it and no second one before it. A call that was made
  already is quoted, not made. Anything else is an answer.
* Llama's other prompts have forms of calls without markers (`llama_calls`).

Both want what `objects_at_end` finds: JSON objects that begin a line and go on to the end of the text. It looks at a text a
fixed number of times, whatever stands in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.calls import AttemptStatus, CallAttempt
from toolgrpo.chat.attempts import BareCalls, CallForm, is_call, json_attempts, load_json, unclosed, unreadable
from toolgrpo.chat.call_bodies import python_calls
from toolgrpo.tools.arguments import ArgumentChecker

_FENCE = re.compile(r"^[^\S\n]*```[^\n]*$", re.MULTILINE)
_NAMED = re.compile(r'\{[^{}"]*"(?:name|function|type|arguments|parameters)"\s*:')
_NO_FORM = CallForm("", "")
_LLAMA = CallForm('{"name": ..., "parameters": {...}}', "}")
_DECODER = json.JSONDecoder()
_MOST_TRIED = 16  # beginnings of objects in a text; each may cost a look at all of it
_LINE_WITH_OBJECT = re.compile(r"^[^\S\n]*(?=\{)", re.MULTILINE)
_BETWEEN = re.compile(r"[\s;,]*")
_FUNCTION_TAG = re.compile(r"^[^\S\n]*<function=(?P<name>[^\s<>{]{1,200})>", re.MULTILINE)
_FUNCTION_END = re.compile(r"</?function>")
_PYTHON_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]{0,200}\(")
_TYPE_FIRST = re.compile(r'\{\s*"type"\s*:\s*"function"')


@dataclass(frozen=True, slots=True)
class Objects:
    """Where objects at the end of a text begin, and what they are."""

    start: int
    values: tuple[Any, ...]


def objects_at_end(text: str) -> Objects | None:
    """JSON objects behind which nothing stands; the first begins a line."""
    for tried, line in enumerate(_LINE_WITH_OBJECT.finditer(text)):
        if tried == _MOST_TRIED:
            return None
        values, place = [], line.end()
        while place < len(text) and text[place] == "{":
            try:
                value, place = _DECODER.raw_decode(text, place)
            except (ValueError, RecursionError):
                break
            values.append(value)
            place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too
        if values and place == len(text):
            return Objects(line.end(), tuple(values))
    return None


def llama_calls(text: str) -> BareCalls | None:
    """Return what Llama 3.1 to 3.3 write beside an object that begins with its name, which is their own form.

    * the object behind a text, with parameters before the name, or as `{"type": "function", ...}` in two forms
    * `<function=look_up>{"key": "x"}</function>`, as 3.1's prompts for custom tools have it
    * `[look_up(key="x")]`, as 3.2's have it, and a JSON list, where the turn is nothing else
    """
    whole = text.strip()
    if _PYTHON_LIST.match(whole) and whole.endswith(")]"):
        return BareCalls("", tuple(python_calls(whole, "", whole)))
    tag = _FUNCTION_TAG.search(text)
    if tag is not None:
        return BareCalls(text[: tag.start()].strip("\n"), tuple(_tagged(text[tag.start() :])))
    if whole.startswith("[") and whole.endswith("]"):
        return _listed(whole)
    found = objects_at_end(text)
    if found is not None and all(map(is_call, found.values)):
        raw = text[found.start :].strip()
        attempts = [attempt for value in found.values for attempt in _read(raw, value)]
        return BareCalls(text[: found.start].strip(), tuple(attempts))
    if _TYPE_FIRST.match(whole):
        return BareCalls("", (unreadable(whole, "it is no JSON object with a name and parameters", _LLAMA),))
    return None


def _tagged(text: str) -> list[CallAttempt]:
    """Read `<function=NAME>{...}</function>`, any number of them."""
    attempts = []
    openings = list(_FUNCTION_TAG.finditer(text))
    for opening, following in zip(openings, [*openings[1:], None], strict=True):
        body = text[opening.end() : following.start() if following is not None else len(text)]
        raw, name = text[opening.start() : opening.end()] + body, opening["name"]
        end = _FUNCTION_END.search(body)
        said = body[: end.start()] if end is not None else body
        try:
            arguments = load_json(said.strip() or "{}")
        except (ValueError, RecursionError) as error:
            attempts.append(unreadable(raw, str(error), _LLAMA, name) if end else unclosed(raw, "</function>", name))
            continue
        attempts += _read(raw, {"name": name, "arguments": arguments})
    return attempts


def _listed(text: str) -> BareCalls | None:
    try:
        values = load_json(text)
    except (ValueError, RecursionError):
        return None
    return BareCalls("", tuple(json_attempts(text, values, _LLAMA))) if values and all(map(is_call, values)) else None


def _read(raw: str, value: Any) -> list[CallAttempt]:
    try:
        return json_attempts(raw, value, _LLAMA)
    except ValueError as error:  # NaN, which Python's JSON takes
        return [unreadable(raw, str(error), _LLAMA)]


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
    (read,) = json_attempts(raw, value, _NO_FORM)
    if read.status is not AttemptStatus.OK or not _fits(read, schemas) or any(_same(read, call) for call in made):
        return None
    if form is None:
        return CallAttempt(AttemptStatus.ACCEPTED, raw, read.name, read.arguments)
    detail = f"the call was not run, because it does not stand in the form of a call. Write it as {form}"
    return CallAttempt(AttemptStatus.UNMARKED, raw, read.name, read.arguments, detail)


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


def _same(one: CallAttempt, other: CallAttempt) -> bool:
    return one.name == other.name and one.arguments == other.arguments
