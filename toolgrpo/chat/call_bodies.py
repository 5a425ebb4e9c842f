"""What stands between the markers of a call, one function a syntax.

Each takes the segments between the markers and gives the attempts they hold: one, or for LFM2, whose block is a list, any
number. Values that a family writes as bare text stay text; the tool's schema decides what they are when the call is
checked. None raises, and none looks at a character more than a fixed number of times.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

from toolgrpo.chat.reading import Marker, Segment, as_text, attempt_from, malformed, read_json_call, unclosed
from toolgrpo.trajectory import AttemptStatus, CallAttempt

__all__ = ["ARG_MARKERS", "QUOTE", "arg_pairs", "function_tags", "gemma_object", "hermes_json", "python_calls"]

QUOTE = '<|"|>'
ARG_MARKERS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_FUNCTION = re.compile(r"\s*<function=([^\n>]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^\n>]*)>")
_FUNCTION_FORM = "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>"
_ARG_FORM = "NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>"
_GEMMA_FORM = f"call:NAME{{key:{QUOTE}text{QUOTE},other:1}}"
_GEMMA_HEAD = re.compile(r"\s*call:([^\s{]*)\s*(?=\{)")
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\]:,\"]+)(\s*:)")
_PYTHON_FORM = "[name(key='value', other=1)]"
# A string of Python, newlines allowed; one that does not end runs to the end of the text, so nothing is read twice.
_STRING = re.compile(r"'(?:[^'\\]|\\.?)*(?:'|\Z)|\"(?:[^\"\\]|\\.?)*(?:\"|\Z)", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}


def hermes_json(body: Sequence[Segment]) -> list[CallAttempt]:
    """`{"name": ..., "arguments": {...}}`"""
    return [read_json_call(as_text(body))]


def function_tags(body: Sequence[Segment]) -> list[CallAttempt]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, the tags being ordinary text."""
    raw = as_text(body)
    head = _FUNCTION.match(raw)
    name = head[1].strip() if head else ""
    if head is None or not name:
        return [malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; a call is {_FUNCTION_FORM}")]
    arguments: dict[str, Any] = {}
    position = head.end()
    while (tag := _PARAMETER.match(raw, position)) is not None:
        end = raw.find("</parameter>", tag.end())
        if end < 0:
            return [unclosed(raw, "</parameter>", name)]
        arguments[tag[1].strip()] = raw[tag.end() : end].removeprefix("\n").removesuffix("\n")
        position = end + len("</parameter>")
    rest = raw[position:].strip()
    if rest not in ("", "</function>"):
        detail = f"{_shown(rest)} cannot be read; a call is {_FUNCTION_FORM}"
        return [malformed(AttemptStatus.INVALID_JSON, raw, detail, name)]
    return [attempt_from(raw, name, arguments)]


def arg_pairs(body: Sequence[Segment]) -> list[CallAttempt]:
    """`NAME`, then pairs of `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>`."""
    raw = as_text(body)
    fields: list[tuple[str, str]] = []  # (the marker it stands behind, the text)
    for segment in [Marker(""), *body]:
        if isinstance(segment, Marker):
            fields.append((segment.text, ""))
        else:
            fields[-1] = (fields[-1][0], fields[-1][1] + segment)
    name = fields[0][1].strip()
    if not name:
        return [malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; a call is {_ARG_FORM}")]
    arguments: dict[str, Any] = {}
    for index in range(1, len(fields), 4):
        pair = fields[index : index + 4]
        if tuple(marker for marker, _ in pair) != ARG_MARKERS or pair[1][1].strip() or pair[3][1].strip():
            detail = f"the arguments cannot be read; a call is {_ARG_FORM}"
            return [malformed(AttemptStatus.INVALID_JSON, raw, detail, name)]
        arguments[pair[0][1].strip()] = pair[2][1]
    return [attempt_from(raw, name, arguments)]


def gemma_object(body: Sequence[Segment]) -> list[CallAttempt]:
    """`call:NAME{key:<|"|>text<|"|>,other:1}`: JSON with bare keys, strings between the quote token."""
    raw = as_text(body)
    head = _GEMMA_HEAD.match(raw)
    if head is None or not head[1]:
        return [malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; a call is {_GEMMA_FORM}")]
    pieces: list[str] = []
    quoted: list[Segment] | None = None
    skip = head.end()
    for segment in body:
        if segment == Marker(QUOTE):
            if quoted is not None:
                pieces.append(json.dumps(as_text(quoted)))
            quoted = [] if quoted is None else None
        elif quoted is not None:
            quoted.append(segment)
        else:
            text = as_text([segment])
            pieces.append(_BARE_KEY.sub(r'\1"\2"\3', text[skip:]))
        skip = max(0, skip - len(as_text([segment])))
    if quoted is not None:
        return [unclosed(raw, QUOTE, head[1])]
    return [attempt_from(raw, head[1], "".join(pieces))]


def python_calls(body: Sequence[Segment]) -> list[CallAttempt]:
    """`[name(key='value', other=1), second()]`, read as Python and never run."""
    raw = as_text(body)
    try:
        one_line = _STRING.sub(lambda string: string[0].replace("\n", "\\n").replace("\r", "\\r"), raw.strip())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python remarks on odd escapes, and this is not our user's code
            tree = ast.parse(one_line, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        detail = f"the call cannot be read: {error or type(error).__name__}; calls are {_PYTHON_FORM}"
        return [malformed(AttemptStatus.INVALID_JSON, raw, detail)]
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    if not calls:
        return [malformed(AttemptStatus.MISSING_NAME, raw, f"the list of calls is empty; calls are {_PYTHON_FORM}")]
    return [_python_call(call, raw) for call in calls]


def _python_call(call: ast.expr, raw: str) -> CallAttempt:
    if not isinstance(call, ast.Call):
        return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; calls are {_PYTHON_FORM}")
    name = _dotted(call.func)
    if not name:
        return malformed(AttemptStatus.MISSING_NAME, raw, f"the call has no name; calls are {_PYTHON_FORM}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return malformed(AttemptStatus.BAD_ARGUMENTS, raw, "every argument needs its name, as in key='value'", name)
    try:
        arguments = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (ValueError, RecursionError) as error:
        return malformed(AttemptStatus.INVALID_JSON, raw, f"an argument cannot be read: {error}", name)
    return attempt_from(raw, name, arguments)


def _dotted(node: ast.expr) -> str:
    """`name` or `module.name`; tools of an MCP server have such names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """A value of Python or of JSON; what JSON cannot hold is an error."""
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


def _shown(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
