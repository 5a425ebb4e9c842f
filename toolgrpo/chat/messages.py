"""Messages as reward functions see them, in the OpenAI form."""

from __future__ import annotations

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.trajectory import AttemptStatus, Message

__all__ = ["assistant_message", "tool_message"]


def assistant_message(parsed: ParsedTurn) -> Message:
    """A sampled turn as a message; only calls that could be read stand in `tool_calls`."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    calls = [
        {"type": "function", "function": {"name": attempt.name, "arguments": dict(attempt.arguments or {})}}
        for attempt in parsed.attempts
        if attempt.status is AttemptStatus.OK
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def tool_message(name: str | None, content: str) -> Message:
    """The answer to one call attempt."""
    message: Message = {"role": "tool", "content": content}
    if name is not None:
        message["name"] = name
    return message
