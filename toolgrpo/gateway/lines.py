"""Lines: the sequences of tokens of one session, each of which only grows.

A line is a segment of the episode to be. The turn that was said last stays open until what came back
for its calls is known. `joined` makes the episode of all lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolgrpo.calls import CallAttempt, ToolResult
from toolgrpo.chat.messages import tool_message
from toolgrpo.ledger import Ledger
from toolgrpo.segments import Segment, first_columns
from toolgrpo.trajectory import Message, StopReason, Trajectory, Turn


@dataclass(slots=True, eq=False)
class Line:
    """One sequence, and what its prompt was made of, as a bridge wants to know it."""

    ledger: Ledger
    messages: Sequence[Message] = ()
    schemas: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None
    parent: Line | None = None  # that it branched off
    busy: bool = False  # a turn of it is being sampled
    open_turn: Turn | None = None

    @property
    def ids(self) -> list[int]:
        """Return the prompt and everything after it. Do not change it."""
        return self.ledger.all_ids

    def goes_on_in(self, ids: Sequence[int]) -> bool:
        """Return whether these tokens begin with this line, and go on."""
        own = self.ids
        return not self.busy and len(own) < len(ids) and list(ids[: len(own)]) == own


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn ended."""

    line: Line
    n_ids: int  # of the line, prompt included
    calls: Mapping[str, CallAttempt]  # by the ids that the client was given


@dataclass(frozen=True, slots=True)
class Start:
    """What a request is sampled from: a line, and the tokens between its end and the next turn."""

    line: Line
    context: tuple[int, ...] = ()
    said: tuple[Message, ...] = ()  # what the tokens stand for, as a reward reads it
    results: tuple[ToolResult, ...] = ()
    user: str | None = None  # what a user said to the answer that the line ended with
    fork: str = ""  # why the line is new, if it is


def answer_to(attempt: CallAttempt | None, message: Message) -> Message:
    """Return what a client sent for a call, or said as the user, in the form that a bridge takes."""
    if message["role"] == "user":
        return {"role": "user", "content": message["content"]}
    if attempt is None:
        return tool_message(message.get("name"), message["content"])
    return tool_message(attempt.name, message["content"], attempt.call_id)


def results_of(
    turn: Turn | None, attempts: Sequence[CallAttempt | None], answers: Sequence[Message], now_s: float
) -> tuple[ToolResult, ...]:
    """Return the results of a turn's calls in their order, as far as they are known."""
    if turn is None:
        return ()
    began_s = turn.started_s + turn.duration_s
    given = {
        id(attempt): ToolResult(answer["content"], attempt.name, started_s=began_s, duration_s=now_s - began_s)
        for attempt, answer in zip(attempts, answers, strict=True)
        if attempt is not None
    }
    results = []
    for attempt in turn.attempts:
        if id(attempt) not in given:
            break
        results.append(given[id(attempt)])
    return tuple(results)


def joined(lines: Sequence[Line], reason: StopReason, **what: Any) -> Trajectory:
    """Return the episode whose segments these lines are, in order of birth."""
    if len(lines) == 1:
        return lines[0].ledger.finish(reason, **what)
    parts = [line.ledger.finish(reason) for line in lines]
    segments = [
        Segment(part.prompt_ids, part.ids, part.mask, part.logprobs, _place(line.parent, lines[:place]))
        for place, (part, line) in enumerate(zip(parts, lines, strict=True))
    ]
    columns = first_columns(segments)
    return Trajectory.of_segments(
        segments,
        messages=[message for part in parts for message in part.messages],
        turns=[
            replace(turn, start=turn.start + column, end=turn.end + column)
            for part, column in zip(parts, columns, strict=True)
            for turn in part.turns
        ],
        stop_reason=reason,
        **what,
    )


def _place(line: Line | None, lines: Sequence[Line]) -> int | None:
    return next((place for place, one in enumerate(lines) if one is line), None)
