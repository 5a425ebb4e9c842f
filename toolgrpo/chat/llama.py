"""Llama 3.1 and 3.2: a call is the turn itself, one bare JSON object with `name` and `parameters`.

There is no marker around it. A turn is read as a call if it begins with `{"name":` or with the token `<|python_tag|>`;
any other JSON, `{"answer": 5}` say, is an answer. Models of this family write several calls with `;` between them now and
then: each is an attempt of its own. What follows the last call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.reading import Marker, Segment, as_text, read_json_call, unclosed
from toolgrpo.trajectory import CallAttempt

__all__ = ["BareJson"]

_TAG = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"name"\s*:')
_BETWEEN = re.compile(r"[\s;]*")
_FORM = '{"name": ..., "parameters": {...}}'


@dataclass(frozen=True, slots=True)
class BareJson:
    """A `Reader`."""

    markers: tuple[str, ...] = (_TAG,)
    thinking: str | None = None

    def read(self, segments: Iterable[Segment], *, closed: bool, thinking: bool) -> ParsedTurn:
        pieces = list(segments)
        tagged = bool(pieces) and pieces[0] == Marker(_TAG)
        text = as_text(pieces[1:] if tagged else pieces)
        attempts: list[CallAttempt] = []
        position = _space_end(text, 0)
        while _CALL.match(text, position) or (tagged and not attempts):
            end = _object_end(text, position)
            if end is None:
                rest, position = text[position:], len(text)
                attempts.append(_read(rest) if closed else unclosed(rest, "}"))
            else:
                attempts.append(_read(text[position:end]))
                position = _space_end(text, end)
        if not attempts:
            return ParsedTurn(text, None, (), closed)
        return ParsedTurn(text[position:].strip("\n"), None, tuple(attempts), closed)


def _space_end(text: str, start: int) -> int:
    """Where the space, and the `;` between two calls, from `start` on ends."""
    found = _BETWEEN.match(text, start)
    return found.end() if found else start


def _object_end(text: str, start: int) -> int | None:
    """Where the JSON value at `start` ends; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def _read(raw: str) -> CallAttempt:
    return read_json_call(raw, arguments_key="parameters", form=_FORM)
