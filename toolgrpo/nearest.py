"""Say what somebody may have meant: the known names nearest to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 100  # characters that are compared; what is longer is no name


def nearest(name: str, known: Iterable[str], n: int = 1, *, alike: float = 0.0) -> list[str]:
    """Return up to `n` of the known names, the nearest first.

    `alike`, from 0 to 1, is what they must share at least.
    """
    return difflib.get_close_matches(name[:_LONGEST], list(known), n=n, cutoff=alike)
