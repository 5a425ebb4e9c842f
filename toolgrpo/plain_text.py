"""Text that others wrote, made safe to show and to keep: nothing in it steers a terminal or tears a
line.

Models, tools, rewards and servers write what they like: escape sequences that clear a screen or
rename its window, C1 controls, line separators that `str.splitlines` takes for the end of a line,
marks that turn the reading direction around, halves of surrogate pairs that no file takes. `plain` and
`plain_json` write such a character as its escape; neither changes any other.

Nothing but the standard library: tool workers and the trainer share it. Not covered: letters that
only look like others.
"""

from __future__ import annotations

import re

__all__ = ["check_nesting", "plain", "plain_json"]

_UNSEEN = (
    "\x7f-\x9f"  # DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks of the reading direction
    "\u2028\u2029\ufeff"  # separators of lines and paragraphs, and the byte order mark
    "\ud800-\udfff"  # half a character
)
_IN_TEXT = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSEEN}]")  # all but tabulators and newlines
_BRACKET = re.compile(r"[\[\]{}]")
_IN_JSON = re.compile(f"[{_UNSEEN}]")  # JSON escapes the first 32 itself


def plain(text: str) -> str:
    """Return `text` with what would steer a terminal written out: `\\x1b` for an escape."""
    return _IN_TEXT.sub(_escaped, text)


def plain_json(json_text: str) -> str:
    """Return a JSON text that stays on its line and means the same, with nothing unseen in it.

    Outside of its strings JSON is ASCII, so each character that is replaced stands in a string,
    where `\\uXXXX` is the same.
    """
    if json_text.isascii() and "\x7f" not in json_text:  # nearly always; and looking costs a tenth
        return json_text
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)


def check_nesting(text: str, most: int = 200) -> None:
    """Raise RecursionError for brackets in brackets without end: a YAML parser takes ten seconds to."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        if depth > most:
            raise RecursionError(f"more than {most} brackets are open at once")


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
