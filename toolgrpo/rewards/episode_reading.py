"""Reading an episode, for those who write rewards.

final_answer(completion)       what the model said last, without calling a tool
last_tool_response(completion) the text of the last tool message
tool_counts(completion)        how often each tool answered
calls(trajectory)              every call attempt with its status and result, malformed ones included
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from toolgrpo.trajectory import AttemptStatus, Message, ToolErrorKind, Trajectory

__all__ = ["Call", "calls", "final_answer", "last_tool_response", "tool_counts"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call attempt and what came back; `result` is None if the episode ended before it was answered."""

    turn: int
    name: str | None
    arguments: Mapping[str, Any]
    status: AttemptStatus
    result: str | None
    error: ToolErrorKind | None

    @property
    def ok(self) -> bool:
        """Well formed, answered, and without an error."""
        return self.status is AttemptStatus.OK and self.result is not None and self.error is None


def final_answer(completion: Sequence[Message]) -> str:
    """The text of the last message if it is the model's and calls no tool, else the empty text."""
    if not completion:
        return ""
    last = completion[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return ""
    return str(last.get("content") or "").rpartition("</think>")[2].strip()


def last_tool_response(completion: Sequence[Message]) -> str | None:
    return next((str(message["content"]) for message in reversed(completion) if message["role"] == "tool"), None)


def tool_counts(completion: Sequence[Message]) -> Counter[str]:
    """Tool messages by the name of their tool; those of attempts without a name are not counted."""
    return Counter(
        str(message["name"]) for message in completion if message["role"] == "tool" and message.get("name") is not None
    )


def calls(trajectory: Trajectory) -> tuple[Call, ...]:
    """Every attempt of an episode, in order."""
    found = []
    for number, turn in enumerate(trajectory.turns):
        for attempt, result in zip_longest(turn.attempts, turn.results):
            found.append(
                Call(
                    turn=number,
                    name=attempt.name,
                    arguments=attempt.arguments or {},
                    status=attempt.status,
                    result=None if result is None else result.content,
                    error=None if result is None else result.error,
                )
            )
    return tuple(found)
