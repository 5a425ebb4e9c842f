"""What others wrote steers no terminal and tears no line, and nothing of it is lost."""

from __future__ import annotations

import json
import sys
import unicodedata

from toolgrpo.plain_text import plain, plain_json

HOSTILE = "\x1b]0;owned\x07\x1b[2J \x9b31m \x85 \u2028 \u2029 \u202e \u2066 \ufeff \ud800 \x7f \x00 \r"


def test_what_would_steer_a_terminal_is_written_out() -> None:
    assert plain("\x1b[2Jé\tn\n") == "\\x1b[2Jé\tn\n"
    shown = plain(HOSTILE)
    assert shown.splitlines() == [shown] and all(unicodedata.category(c)[0] != "C" for c in shown)
    ordinary = "".join(map(chr, range(0x20, 0x7F))) + "äß中\N{GRINNING FACE}\N{ZERO WIDTH JOINER}\n\t"
    assert plain(ordinary) == ordinary


def test_json_stays_on_its_line_and_means_the_same() -> None:
    value = {"text": HOSTILE, HOSTILE: [HOSTILE, 'quoted \\" \\\\ \\u2028']}
    text = plain_json(json.dumps(value, ensure_ascii=False))
    assert text.splitlines() == [text] and json.loads(text) == value
    text.encode("utf-8")


def test_every_character_that_ends_a_line_somewhere_is_escaped_and_comes_back() -> None:
    everything = "".join(map(chr, range(sys.maxunicode, -1, -1)))  # no two halves that make a whole character
    text = plain_json(json.dumps(everything, ensure_ascii=False))
    assert len(text.splitlines()) == 1 and json.loads(text) == everything
