"""Void turns: those with neither a call nor a final answer (SimpleTIR, arXiv 2509.02479).

A turn of nothing, of reasoning alone, one that was cut before a call, or one whose calls cannot be
read says nothing that anybody could go on from. An answer that copies a result with its tags says
nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolgrpo.calls import READABLE
from toolgrpo.trajectory import Trajectory, Turn


def is_void(turn: Turn) -> bool:
    """Return whether a turn has neither a call that could be read nor a final answer.

    A final answer is some text, said to its end, with no attempt at a call.
    """
    if turn.attempts:
        return not any(attempt.status in READABLE for attempt in turn.attempts)
    return not (turn.closed and turn.content.strip())


def is_void_record(turn: Mapping[str, Any]) -> bool:
    """Return the same of a turn as it is recorded."""
    if attempts := turn.get("attempts"):
        return not any(attempt.get("status") in READABLE for attempt in attempts)
    return not (turn.get("closed", True) and str(turn.get("content") or "").strip())


def has_void_turn(trajectory: Trajectory) -> bool:
    return any(map(is_void, trajectory.turns))


def copies_result(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an episode ends with a copy of its last result, in the tags of a result."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] != "tool":
        return False
    _, opened, said = str(messages[-1].get("content") or "").rpartition("<tool_response>")
    return bool(opened) and said.partition("</tool_response>")[0].strip() == str(messages[-2]["content"]).strip()
