"""Flags and YAML keys of earlier versions: one sentence each, saying what to use instead.

`given_words.py` answers with it where a flag or key is not known.
"""

from __future__ import annotations

__all__ = ["REMOVED"]

_NO_ECHO = "no loss is taken on tool results; teach their form with `toolgrpo sft` on worked conversations"
REMOVED: dict[str, str] = {
    "echo_weight": _NO_ECHO,
    "echo_tools": _NO_ECHO,
    "profile": "use `toolgrpo report OUTPUT_DIR`, which draws the seconds of each phase of every step",
}
