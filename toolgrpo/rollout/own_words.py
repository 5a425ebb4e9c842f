"""What an episode itself says to the model: results as messages, refusals, an environment's first observation."""

from __future__ import annotations

from toolgrpo.calls import CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.chat.messages import tool_message
from toolgrpo.drops import Drop, DropCause
from toolgrpo.trajectory import Message


def answer_message(result: ToolResult, attempt: CallAttempt) -> Message:
    return tool_message(result.name, result.content, attempt.call_id)


def drop_of(result: ToolResult) -> Drop:
    return Drop(DropCause.TOOL, result.content.removeprefix("Error: "))


def refusal(name: str | None, budget: int | None) -> ToolResult:
    return ToolResult(
        content=f"Error: not called. Only {budget} tool calls are allowed, and they are used up. Answer with what you have.",
        name=name,
        error=ToolErrorKind.LIMIT,
    )


def with_observation(messages: list[Message], observation: str) -> list[Message]:
    """Append the first observation of an environment to the last message of the prompt."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{observation}"}]
