"""Chat format: the seam between messages and token ids.

Invariants every format keeps (contract tests run the same cases over all of them):

* `prompt` and `bridge` are the only places where text becomes tokens in an episode. What the model sampled is never
  rendered or tokenized again.
* `bridge(ids, results)` extends `ids`: prompt + sampled + bridge is the conversation as the model's own template would
  have it, and the call looks at the row and the tail of `ids` only, so its cost does not grow with the number of turns.
  The same for what a user says to an answer.
* Text from users and tools never becomes control tokens.
* `parse` never raises, whatever the model wrote.

This package knows no torch, TRL trainer or vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from toolgrpo.episode.tool_calls import RUNNABLE, CallAttempt
from toolgrpo.episode.trajectory import Message


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One sampled assistant turn, taken apart. Attempts stand in the order they were written."""

    content: str
    reasoning: str | None
    attempts: tuple[CallAttempt, ...]
    closed: bool  # the end-of-turn token was sampled


class ChatFormat(Protocol):
    """Token ids for messages, and messages from token ids, for one model family."""

    @property
    def name(self) -> str: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn; the engine stops at them and returns them."""
        ...

    @property
    def call_text(self) -> str:
        """A call as this family writes it, for a model that got it wrong."""
        ...

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the ids of a conversation up to and including the header of the next assistant turn."""
        ...

    def bridge(
        self,
        ids: Sequence[int],
        tool_messages: Sequence[Message],
        *,
        messages: Sequence[Message] = (),
        schemas: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the ids that follow `ids` (which end with an assistant turn) for these messages, up to the next assistant header.

        They are the results of the turn's calls; or the only one is the user's, to a turn without calls.
        If the turn was cut before its end-of-turn token, the synthesised close comes first. `messages`, `schemas` and
        `enable_thinking` are what the prompt was made of: the header of a turn may depend on them, and ids alone cannot tell.
        """
        ...

    def parse(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> ParsedTurn:
        """Take one sampled turn apart. Never raises.

        `before` are the ids that the turn follows. Their end tells whether the prompt has already opened the model's
        thinking, which matters for a turn that was cut before it closed it: what stands there is thinking and no call.
        """
        ...


# Messages as reward functions see them, in the OpenAI form.


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
