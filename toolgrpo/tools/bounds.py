"""Bounds of depth and size for JSON that a model wrote, checked before anything else reads it.

Whatever walks such a value later (the coercion, the validator, the wire to a worker or a server)
may then recurse, turn every integer into a float and encode every text as UTF-8. A degenerate
completion writes none of the three well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 300  # less than a float can hold, so that no comparison or division of a validator overflows
_TOO_LARGE = 10**MAX_DIGITS
_TOO_DEEP = f"it is nested too deeply; at most {MAX_DEPTH} levels are allowed"
_TOO_MANY_DIGITS = f"it holds an integer of more than {MAX_DIGITS} digits"


def read_json(text: str) -> Any:
    """Return the value of a JSON text; every way to fail is a ValueError, nesting too."""
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if (complaint := beyond_bounds(value)) is not None:
        raise ValueError(complaint)
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:  # Python reads at most 4300, and takes time for them
        raise ValueError(_TOO_MANY_DIGITS)
    return int(digits)


def beyond_bounds(value: object) -> str | None:
    """Say what in a JSON value is beyond the bounds, in one step per value, without recursion."""
    pending: list[tuple[object, int]] = [(value, 1)]
    while pending:
        node, depth = pending.pop()
        if isinstance(node, Mapping | list | tuple):
            if depth > MAX_DEPTH:
                return _TOO_DEEP
            if isinstance(node, list) and set(map(type, node)) == {int}:  # token ids come by the thousand
                if max(map(abs, node)) >= _TOO_LARGE:
                    return _TOO_MANY_DIGITS
                continue
            members = node
            if isinstance(node, Mapping):
                pending += [(key, depth + 1) for key in node]
                members = list(node.values())
            pending += [(member, depth + 1) for member in members]
        elif isinstance(node, int) and abs(node) >= _TOO_LARGE:
            return _TOO_MANY_DIGITS
        elif isinstance(node, float) and not math.isfinite(node):
            return f"it holds {node}, which is no number in JSON"
        elif isinstance(node, str) and not _is_text(node):
            return "it holds half a character (a lone surrogate like \\ud800)"
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
