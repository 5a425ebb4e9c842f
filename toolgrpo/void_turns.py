"""Void turns: those with neither a call nor a final answer (SimpleTIR, arXiv 2509.02479).

A turn of nothing, of reasoning alone, one that was cut before a call, or one whose calls cannot be
read says nothing that anybody could go on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolgrpo.trajectory import AttemptStatus, ToolErrorKind, Trajectory, Turn

__all__ = ["VOID_TURNS", "has_void_turn", "is_void", "is_void_record"]

VOID_TURNS = ("keep", "mask_turn", "mask_episode", "end")

_READABLE = (AttemptStatus.OK, AttemptStatus.UNKNOWN_TOOL, AttemptStatus.BAD_ARGUMENTS)


def is_void(turn: Turn) -> bool:
    """Return whether a turn has neither a call that could be read nor a final answer.

    A final answer is some text, said to its end, with no attempt at a call.
    """
    if turn.attempts:
        return not any(attempt.status in _READABLE for attempt in turn.attempts) and not _ran_unmarked(turn)
    return not (turn.closed and turn.content.strip())


def is_void_record(turn: Mapping[str, Any]) -> bool:
    """Return the same of a turn as it is recorded."""
    attempts, results = turn.get("attempts") or (), turn.get("results") or ()
    if attempts:
        unmarked = (
            result.get("error") != ToolErrorKind.UNMARKED
            for attempt, result in zip(attempts, results, strict=False)
            if attempt.get("status") == AttemptStatus.UNMARKED
        )
        return not any(attempt.get("status") in _READABLE for attempt in attempts) and not any(unmarked)
    return not (turn.get("closed", True) and str(turn.get("content") or "").strip())


def has_void_turn(trajectory: Trajectory) -> bool:
    return any(map(is_void, trajectory.turns))


def _ran_unmarked(turn: Turn) -> bool:
    """Return whether a call without its markers was run, as `unmarked_calls: accept` wants it."""
    answered = zip(turn.attempts, turn.results, strict=False)
    return any(
        attempt.status is AttemptStatus.UNMARKED and result.error is not ToolErrorKind.UNMARKED
        for attempt, result in answered
    )
