"""Reading an episode, for those who write rewards.

final_answer(completion)       what the model said last, without calling a tool
last_tool_response(completion) the text of the last tool message
tool_counts(completion)        how often each tool answered
calls(trajectory)              every call attempt with its status and result, malformed ones too
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolgrpo.episode.tool_calls import Call
from toolgrpo.episode.trajectory import Message, Trajectory


def final_answer(completion: Sequence[Message]) -> str:
    """Return the text of the last message if it is the model's and calls no tool, else ""."""
    if not completion:
        return ""
    last = completion[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return ""
    _, end, said = str(last.get("content") or "").rpartition("</think>")
    return "" if not end and said.lstrip().startswith("<think>") else said.strip()  # thoughts that were cut off


def last_tool_response(completion: Sequence[Message]) -> str | None:
    return next((str(message["content"]) for message in reversed(completion) if message["role"] == "tool"), None)


def tool_counts(completion: Sequence[Message]) -> Counter[str]:
    """Count tool messages by the name of their tool, without those that have none."""
    return Counter(
        str(message["name"]) for message in completion if message["role"] == "tool" and message.get("name") is not None
    )


def calls(trajectory: Trajectory) -> tuple[Call, ...]:
    """Return every call attempt of an episode, in order."""
    return trajectory.calls
