"""Messages as reward functions see them, in the OpenAI form."""

from __future__ import annotations

from typing import Any

from toolgrpo.calls import RUNNABLE, CallAttempt
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.trajectory import Message


def assistant_message(parsed: ParsedTurn) -> Message:
    """Return a sampled turn as a message; only calls that could be read stand in `tool_calls`."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    calls = [_call(attempt) for attempt in parsed.attempts if attempt.status in RUNNABLE]
    if calls:
        message["tool_calls"] = calls
    return message


def tool_message(name: str | None, content: str, call_id: str | None = None) -> Message:
    """Return the answer to one call attempt; `call_id` as the model wrote it, if it did."""
    message: Message = {"role": "tool", "content": content}
    if name is not None:
        message["name"] = name
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message


def _call(attempt: CallAttempt) -> dict[str, Any]:
    function = {"name": attempt.name, "arguments": dict(attempt.arguments or {})}
    named = {} if attempt.call_id is None else {"id": attempt.call_id}
    return {**named, "type": "function", "function": function}
