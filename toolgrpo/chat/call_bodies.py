"""The bodies of calls that no content parser of transformers can read: Gemma's objects, LFM2's Python, DeepSeek's and
Mistral's calls, whose two spellings each are one field; and calls that stand in a text without markers, as Llama's other
prompts have them.

Each function takes what was written (for the record), the name that the opening said, and the body as guarded text, and
gives the attempts it holds: one, or for LFM2, whose block is a list, any number. None raises, and none looks at a character
more than a fixed number of times.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

from confined_python import parse_python
from toolgrpo.chat.attempts import (
    BareCalls,
    CallForm,
    attempt_from,
    is_call,
    json_attempts,
    load_json,
    malformed,
    nameless,
    unclosed,
    unreadable,
)
from toolgrpo.chat.encoding import unguarded
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt

_QUOTE = '<|"|>'
_GEMMA_FORM = f"call:NAME{{key:{_QUOTE}text{_QUOTE},other:1}}"
# A string of JSON, which models write too, or a bare key.
_STRING_OR_KEY = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|([{,]\s*)([^\s{}\[\]:,"]+)(\s*:)', re.DOTALL)
_PYTHON_FORM = "[name(key='value', other=1)]"
# A string of Python, newlines allowed; one that does not end runs to the end of the text, so nothing is read twice. Or the
# name of a tool or of an argument, whole; tools of MCP servers have dots and dashes in theirs.
_STRING_OR_NAME = re.compile(
    r"(?P<quote>'{3}|\"{3}|['\"])(?:(?!(?P=quote))[^\\]|\\.?)*+(?:(?P=quote)|\Z)"
    r"|(?<![\w.:-])(?P<name>[^\W\d][\w.:-]*+)(?=\s*(?:\(|=(?!=)))",
    re.DOTALL,
)
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK = CallForm(f'NAME{_DEEPSEEK_SEPARATOR}{{"key": "value"}}', "<｜tool▁call▁end｜>")
_FENCED = re.compile(r"\s*(?P<name>[^\s`{]+)\s*```(?:json)?\s*(?P<arguments>\{.*)", re.DOTALL)
_MISTRAL = CallForm('[TOOL_CALLS]NAME[ARGS]{"key": "value"}', "</s>")
_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>[A-Za-z0-9]{9})?[^\[]*)?\[ARGS\]")
_CONSTANTS = {"true": True, "false": False, "null": None}


def gemma_object(raw: str, name: str, body: str) -> list[CallAttempt]:
    """Read `{key:<|"|>text<|"|>,other:1}`: JSON with bare keys, strings between the quote token."""
    pieces = body.split(_QUOTE)
    if len(pieces) % 2 == 0:
        detail = f"a string was not closed with {_QUOTE}; a call is {_GEMMA_FORM}"
        return [malformed(AttemptStatus.UNCLOSED, raw, detail, name)]
    for place, piece in enumerate(pieces):
        inside = place % 2 == 1
        pieces[place] = json.dumps(unguarded(piece)) if inside else _STRING_OR_KEY.sub(_quoted_key, unguarded(piece))
    return [attempt_from(raw, name, "".join(pieces))]


def _quoted_key(found: re.Match[str]) -> str:
    return found[0] if found[2] is None else f'{found[1]}"{found[2]}"{found[3]}'


def python_calls(raw: str, name: str, body: str) -> list[CallAttempt]:
    """Read `[name(key='value', other=1), second()]` as Python, without running it."""
    stand_ins: dict[str, str] = {}  # for names that Python may not know as such (`get-weather`, `from`)

    def as_python(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0].replace("\n", "\\n").replace("\r", "\\r")
        return stand_ins.setdefault(found["name"], f"_{len(stand_ins)}")

    try:
        one_line = _STRING_OR_NAME.sub(as_python, unguarded(body).strip())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python remarks on odd escapes, and this is not our user's code
            tree = parse_python(one_line, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        detail = f"the call cannot be read: {error or type(error).__name__}; calls are {_PYTHON_FORM}"
        return [malformed(AttemptStatus.INVALID_JSON, raw, detail)]
    calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    if not calls:
        return [malformed(AttemptStatus.MISSING_NAME, raw, f"the list of calls is empty; calls are {_PYTHON_FORM}")]
    names = {stand_in: name for name, stand_in in stand_ins.items()}
    return [_python_call(call, raw, names) for call in calls]


def deepseek_call(raw: str, name: str, body: str) -> list[CallAttempt]:
    """Read `NAME<｜tool▁sep｜>{...}`, or `function<｜tool▁sep｜>NAME` and the arguments in a code fence."""
    kind, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        return _json_calls(raw, unguarded(body), _DEEPSEEK)
    fenced = _FENCED.match(rest)
    if fenced is None:
        said, arguments = unguarded(kind).strip(), unguarded(rest).strip()
    else:
        said, arguments = unguarded(fenced["name"]), unguarded(fenced["arguments"]).strip().removesuffix("```").strip()
    return [attempt_from(raw, said, arguments)] if said else [nameless(raw, _DEEPSEEK)]


def mistral_calls(raw: str, name: str, body: str) -> list[CallAttempt]:
    """Read `[{"name": ..., "arguments": ..., "id": ...}]`, or a name, for some an id, and arguments."""
    text = unguarded(body)
    head = _MISTRAL_HEAD.fullmatch(raw[: len(raw) - len(text)])
    if head is None:
        return _json_calls(raw, text, _MISTRAL)
    return [attempt_from(raw, head["name"], text, head["id"])]


def _json_calls(raw: str, text: str, form: CallForm) -> list[CallAttempt]:
    try:
        return json_attempts(raw, load_json(text), form) or [nameless(raw, form)]
    except (ValueError, RecursionError) as error:
        return [unreadable(raw, str(error)[:200] or type(error).__name__, form)]


def _python_call(call: ast.expr, raw: str, names: dict[str, str]) -> CallAttempt:
    if not isinstance(call, ast.Call):
        return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; calls are {_PYTHON_FORM}")
    name = names.get(call.func.id, call.func.id) if isinstance(call.func, ast.Name) else ""
    if not name:
        return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; calls are {_PYTHON_FORM}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, "every argument needs its name, as in key='value'", name)
    try:
        given = {str(keyword.arg): keyword.value for keyword in call.keywords}
        arguments = {names.get(name, name): _literal(value) for name, value in given.items()}
    except (ValueError, RecursionError) as error:
        return malformed(AttemptStatus.INVALID_JSON, raw, f"an argument cannot be read: {error}", name)
    return attempt_from(raw, name, arguments)


def _literal(node: ast.expr) -> Any:
    """Return a value of Python or of JSON; what JSON cannot hold is an error."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ValueError("a number is too large")
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    raise ValueError(f"{type(node).__name__} is no plain value")


# Calls without markers.
#
# `objects_at_end` finds JSON objects that begin a line and go on to the end of the text. It looks at a text a fixed number of
# times, whatever stands in it.

_LLAMA = CallForm('{"name": ..., "parameters": {...}}', "}")
_TAGGED = CallForm("", "</function>")
_DECODER = json.JSONDecoder()
_MOST_TRIED = 16  # beginnings of objects in a text; each may cost a look at all of it
_LINE_WITH_OBJECT = re.compile(r"^[^\S\n]*(?=\{)", re.MULTILINE)
_BETWEEN = re.compile(r"[\s;,]*")
_FUNCTION_TAG = re.compile(r"^[^\S\n]*<function=(?P<name>[^\s<>{]{1,200})>", re.MULTILINE)
_FUNCTION_END = re.compile(r"</?function>")
_PARAMETERS = CallForm("", "</function> behind its parameters")
_PARAMETER_TAG = re.compile(r"\s*+<parameter=")
_PARAMETER = re.compile(
    r"\s*+<parameter=(?P<key>[^\s>]++)[^\S\n]*+>\n?+(?P<value>(?:[^\n<]++|\n(?!</parameter>)|<(?!/parameter>))*+)\n?+</parameter>"
)
_FUNCTION_CLOSED = re.compile(r"\s*+</function>(?:\s*+</tool_call>)?+\s*+")
_PYTHON_LIST = re.compile(r"\[\s*[A-Za-z_][\w.:-]{0,200}\(")
_TYPE_FIRST = re.compile(r'\{\s*"type"\s*:\s*"function"')


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects at the end of a text, and where they begin."""

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


def tagged_calls(text: str) -> BareCalls | None:
    """Return what Qwen3-Coder writes without `<tool_call>` at the end of a turn, as vLLM's parser reads it: `<function=NAME>`,
    parameters, `</function>`. With something else behind it, it is an answer that shows a call.
    """
    opening = first = _FUNCTION_TAG.search(text)
    attempts = []
    while opening is not None:
        arguments, place = {}, opening.end()
        while (found := _PARAMETER.match(text, place)) is not None:
            arguments[found["key"]], place = found["value"], found.end()
        closing = _FUNCTION_CLOSED.match(text, place)
        if closing is None:
            if not arguments and _PARAMETER_TAG.match(text, place) is None:
                return None
            attempts.append(unclosed(text[opening.start() :], _PARAMETERS, opening["name"]))
            break
        attempts.append(attempt_from(text[opening.start() : closing.end()], opening["name"], arguments))
        if closing.end() == len(text):
            break
        opening = _FUNCTION_TAG.match(text, closing.end())
    return None if first is None or opening is None else BareCalls(text[: first.start()].strip(), tuple(attempts))


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
            attempts.append(unreadable(raw, str(error), _LLAMA, name) if end else unclosed(raw, _TAGGED, name))
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
