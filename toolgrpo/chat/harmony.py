"""GPT-OSS (the harmony format): a turn is a row of messages, each with a header that says whom and what it is for.

`<|channel|>analysis<|message|>` is reasoning; a header with a recipient (`to=functions.NAME`, before or after the channel)
is a call and its body the arguments; everything else is content. The prompt ends with `<|start|>assistant`, so a turn
begins in the middle of a header. `<|call|>` and `<|return|>` end a turn, `<|end|>` only a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.reading import Marker, Segment, as_text, attempt_from, malformed, unclosed
from toolgrpo.trajectory import AttemptStatus, CallAttempt

__all__ = ["Harmony"]

_START, _END, _CHANNEL, _MESSAGE = "<|start|>", "<|end|>", "<|channel|>", "<|message|>"
_CONSTRAIN, _CALL, _RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]*)")
_FORM = f'to=functions.NAME{_CHANNEL}commentary json{_MESSAGE}{{"key": "value"}}{_CALL}'


@dataclass(frozen=True, slots=True)
class Harmony:
    """A `Reader`."""

    markers: tuple[str, ...] = (_START, _END, _CHANNEL, _MESSAGE, _CONSTRAIN, _CALL, _RETURN)
    thinking: str | None = None

    def read(self, segments: Iterable[Segment], *, closed: bool, thinking: bool) -> ParsedTurn:
        thoughts: list[str] = []
        content: list[str] = []
        attempts: list[CallAttempt] = []
        for header, body, ended in _messages(segments, closed):
            recipient = _RECIPIENT.search(header)
            if recipient is not None and body is not None and recipient[1] != "assistant":
                attempts.append(_call(recipient[1], body, ended))
            elif body is None:  # no <|message|>: there was no header, only text
                content.append(header)
            else:
                (thoughts if _channel(header) == "analysis" else content).append(body)
        said = [text for text in content if text]
        return ParsedTurn("\n".join(said), "\n".join(thoughts) if thoughts else None, tuple(attempts), closed)


def _messages(segments: Iterable[Segment], closed: bool) -> Iterable[tuple[str, str | None, bool]]:
    """(header, body or None, whether something ended it) for each message of a turn."""
    header: list[Segment] = []
    body: list[Segment] | None = None
    for segment in segments:
        if segment in (Marker(_END), Marker(_START), Marker(_CALL), Marker(_RETURN)):
            if header or body is not None:
                yield as_text(header), None if body is None else as_text(body), True
            header, body = [], None
        elif segment == Marker(_MESSAGE) and body is None:
            body = []
        else:
            (header if body is None else body).append(segment)
    if header or body is not None:
        yield as_text(header), None if body is None else as_text(body), closed


def _channel(header: str) -> str:
    words = header.partition(_CHANNEL)[2].replace(_CONSTRAIN, " ").split()
    return words[0] if words else ""


def _call(recipient: str, body: str, ended: bool) -> CallAttempt:
    name = recipient.removeprefix("functions.")
    if not ended:
        return unclosed(body, _CALL, name or None)
    if not name:
        return malformed(AttemptStatus.MISSING_NAME, body, f"the call has no name; a call is {_FORM}")
    return attempt_from(body, name, body.strip() or "{}")
