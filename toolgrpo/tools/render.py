"""Results as the text a model reads.

A string stays as it is, everything else becomes JSON; what is too long is cut with a notice; what cannot be encoded as
UTF-8 (lone surrogates) is replaced, because a tokenizer would refuse it. Used inside the workers, where a huge result is
cut before it travels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["RenderedText", "UnrenderableResult", "cut", "describe_exception", "render_result"]


class UnrenderableResult(Exception):
    """A tool returned something that has no text form; the message says what."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    text: str
    truncated: bool


def render_result(value: object, max_chars: int) -> RenderedText:
    """The text of a tool's return value."""
    return cut(value if type(value) is str else _as_json(value), max_chars)


def cut(text: str, max_chars: int) -> RenderedText:
    """At most `max_chars` characters of the text, with a notice of what was left out."""
    if len(text) <= max_chars:
        return RenderedText(_encodable(text), truncated=False)
    notice = f"\n[cut: {len(text) - max_chars} of {len(text)} characters left out]"
    return RenderedText(_encodable(text[:max_chars]) + notice, truncated=True)


def describe_exception(error: BaseException, max_chars: int = 500) -> str:
    """`ValueError: what it says`, also for exceptions whose own text raises."""
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # a user's __str__ is user code
        text = "(its message cannot be read)"
    return cut(f"{kind}: {text}" if text else kind, max_chars).text


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
    """numpy's scalars and arrays know how to become plain; nothing else is guessed."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return str(text)
