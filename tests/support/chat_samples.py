"""One small tool and the conversations about it that tests and benchmarks of chat formats share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.chat import ChatFormat, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.episode.trajectory import Message

LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def calling(*calls: tuple[str, Mapping[str, Any]], content: str = "") -> Message:
    """Return an assistant turn that makes these calls: (name, arguments)."""
    listed = [{"type": "function", "function": {"name": name, "arguments": dict(args)}} for name, args in calls]
    return {"role": "assistant", "content": content, "tool_calls": listed}


@dataclass(frozen=True, slots=True)
class PrintedTurn:
    """What the model would have sampled, and the ids it would have sampled it after."""

    before: list[int]
    said: list[int]


def printed_turn(
    chat: ChatFormat, asked: Sequence[Message], turn: Message, results: Sequence[Message], schemas: Sequence[Any]
) -> PrintedTurn:
    """Render the turn as the model's own template does, up to and with its end-of-turn token."""
    prompt = chat.prompt(asked, schemas)
    whole = chat.prompt([*asked, turn, *results], schemas)
    start = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    return PrintedTurn(whole[:start], whole[start : whole.index(chat.stop_ids[0], start) + 1])


def check_read_back(chat: TemplateFormat, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Assert that these calls are read in order, and of a turn that is cut anywhere those that it had finished."""
    calls = calls[: 1 if chat.family.one_call else 2]
    results = [tool_message("look_up", "r")] * len(calls)
    printed = printed_turn(chat, [{"role": "user", "content": "q"}], calling(*calls), results, [LOOK_UP])
    whole = chat.parse(printed.said, before=printed.before)
    assert whole.closed and not whole.content
    assert [(a.status, a.name, a.arguments) for a in whole.attempts] == [(AttemptStatus.OK, *call) for call in calls]
    read = 0
    for cut in range(len(printed.said)):
        parsed = chat.parse(printed.said[:cut], before=printed.before)
        good = [attempt for attempt in parsed.attempts if attempt.status is AttemptStatus.OK]
        assert not parsed.closed and len(parsed.attempts) - len(good) <= 1
        assert [a.arguments for a in good] == [arguments for _, arguments in calls[: len(good)]] and len(good) >= read
        assert all(attempt.detail for attempt in parsed.attempts if attempt.status is not AttemptStatus.OK)
        read = len(good)


def thinking_markers(chat: TemplateFormat) -> tuple[str, str]:
    """Return what a model of this family writes around its thinking."""
    from toolgrpo.chat.turn_reader import TurnReader

    assert isinstance(chat.reader, TurnReader) and chat.reader.reasoning is not None
    field = chat.reader.reasoning
    closing = next(text for text in ("</think>", "<channel|>") if field.close_re.fullmatch(text))
    return field.open_literals[0], closing
