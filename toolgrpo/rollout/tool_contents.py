"""Where the text of tool results lies among the tokens that follow a turn.

The tokens of a result are those that would be others, had the tool said something else: the bridge
is made once more with another text, and what both begin and end with is the template's. So role
tags and markers are never taken for a tool's words, whatever the chat format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolgrpo.trajectory import Message

__all__ = ["content_spans"]

_OTHER_TEXTS = ("x", "0", "~")  # one of them begins and ends otherwise than any text


def content_spans(
    bridge: Sequence[int], messages: Sequence[Message], make_bridge: Callable[[Sequence[Message]], Sequence[int]]
) -> list[tuple[int, int] | None]:
    """Return where the text of each message lies in `bridge`, as (start, end).

    None for a message without text, or whose text the template does not show.
    """
    spans: list[tuple[int, int] | None] = []
    for place, message in enumerate(messages):
        text = str(message["content"]).strip()
        if not text:
            spans.append(None)
            continue
        other = next(one for one in _OTHER_TEXTS if one not in (text[0], text[-1]))
        changed = make_bridge([*messages[:place], {**message, "content": other}, *messages[place + 1 :]])
        start = _alike(bridge, changed)
        end = len(bridge) - _alike(bridge[start:][::-1], changed[start:][::-1])
        spans.append((start, end) if start < end else None)
    return spans


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return with how many equal tokens two sequences begin."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
