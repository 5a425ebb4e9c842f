"""Results as the text a model reads.

A string stays as it is, everything else becomes JSON; what cannot be encoded as UTF-8 (lone
surrogates) is replaced, because a tokenizer would refuse it. What is longer than a bound loses its
middle where it is made, before it travels: the bound is against memory that runs out, not for the
model. How much of a result the model sees is decided in tokens, by the episode
(`rollout/limits.py`), and it sees one notice that counts what both left out.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.episode.tool_calls import ToolErrorKind

_MAX_ERROR_CHARS = 600


class BadArguments(Exception):
    """The arguments do not fit the function; the message is for the model."""


class UnrenderableResult(Exception):
    """A tool returned something that has no text form; the message says what."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text, and how many characters its notice says are missing; 0 for a text that is whole."""

    text: str
    left_out: int


@dataclass(frozen=True, slots=True)
class Ends:
    """The beginning and end of a text, as far as they are at hand, and its length once."""

    first: str
    last: str
    n_chars: int


def render_result(value: object, max_chars: int) -> RenderedText:
    """Return the text of a tool's return value. The code of a generator is the tool's: it raises what it raises."""
    value = list(value) if inspect.isgenerator(value) else value
    if _is_table(value):
        return cut(_plain(value), max_chars)
    return cut(value if type(value) is str else _as_json(value), max_chars)


def cut(text: str, max_chars: int, left_out: int = 0) -> RenderedText:
    """Keep the first and last characters of a longer text, `max_chars` of them, around a notice.

    `left_out` is what a notice in the text counts already; the new one counts that too, and stands
    in its place.
    """
    if len(text) <= max_chars:
        return RenderedText(encodable(text), left_out)
    ends = ends_of(text, left_out)
    half = max_chars // 2
    head, tail = ends.first[: max_chars - half], ends.last[-half:] if half else ""
    return joined(encodable(head), encodable(tail), ends.n_chars)


def ends_of(text: str, left_out: int) -> Ends:
    """Return what stands before the notice and after it; without one, the whole text as both."""
    first, notice, last = text.partition(_notice(left_out)) if left_out else (text, "", "")
    return Ends(first, last, len(first) + left_out + len(last)) if notice else Ends(text, text, len(text))


def joined(head: str, tail: str, n_chars: int) -> RenderedText:
    """Return what is left of a text of `n_chars` characters, around a notice of the rest."""
    left_out = n_chars - len(head) - len(tail)
    return RenderedText(f"{head}{_notice(left_out)}{tail}", left_out)


def _notice(left_out: int) -> str:
    return f"\n[... {left_out} characters left out ...]\n"


def describe_exception(error: BaseException, max_chars: int = 500) -> str:
    """Return `ValueError: what it says`, also for exceptions whose own text raises."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # a user's __str__ is user code
        text = "(its message cannot be read)"
    return cut(f"{kind}: {text}" if text else kind, max_chars).text


def describe_failure(error: BaseException) -> tuple[ToolErrorKind, str]:
    """Return what kind of error a call ended with, and what to tell the model."""
    if isinstance(error, BadArguments):
        return ToolErrorKind.BAD_ARGUMENTS, str(error)
    if isinstance(error, UnrenderableResult):
        return ToolErrorKind.BAD_RESULT, str(error)
    if isinstance(error, DropEpisode):
        return ToolErrorKind.DROPPED, cut(error.reason, _MAX_ERROR_CHARS).text
    return ToolErrorKind.RAISED, describe_exception(error)


def _as_json(value: object) -> str:
    from pydantic_core import to_jsonable_python

    try:
        plain = to_jsonable_python(value, fallback=_plain, inf_nan_mode="constants")
        return json.dumps(plain, ensure_ascii=False)
    except Exception as error:  # serialisation calls user code
        raise UnrenderableResult(
            f"the tool returned a {type(value).__name__}, which cannot be shown as text ({describe_exception(error, 200)})"
        ) from error


def _plain(value: Any) -> Any:
    """Make arrays and tensors lists, and the tables of pandas the text that they print; guess nothing else."""
    if _library(value) in {"numpy", "torch"} and hasattr(value, "tolist"):
        return value.tolist()
    if _is_table(value):
        return value.to_string()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _is_table(value: object) -> bool:
    return _library(value) == "pandas" and hasattr(value, "to_string")


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def encodable(text: str) -> str:
    """Return a text that every tokenizer takes: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
