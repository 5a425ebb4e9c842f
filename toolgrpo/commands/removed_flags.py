"""Flags and YAML keys of earlier versions: one sentence each, saying what to use instead.

`given_words.py` answers with it where a flag or key is not known.
"""

from __future__ import annotations

__all__ = ["REMOVED"]

REMOVED: dict[str, str] = {
    "profile": "use `toolgrpo report OUTPUT_DIR`, which draws the seconds of each phase of every step",
}
