"""The chat format of every family: the model's own template renders, a reader of its response template reads.

The bridge is what the template prints between the end of an assistant turn and the header of the next one, taken from a
short conversation: the row, one turn that calls a tool for each result, and the results. Nothing that was sampled is
rendered, and the cost does not grow with the conversation. `bridge_proof.py` shows, before any training, that the same text
follows in a longer conversation too. What a user says to an answer is bridged alike (`bridge_proof.py`).

Not covered: templates that hide what was said before. The bridge never renders history, so nothing that was sampled is
lost; such a model sees more of its own thinking than its template would show it, also behind the next words of a user.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from toolgrpo.chat.attempts import Marker, Segment
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.encoding import MARK, Encoder, TextGuard, with_marks
from toolgrpo.chat.families import Family
from toolgrpo.chat.message_shapes import (
    calls_in_text,
    one_call_each,
    results_inside,
    tools_as_text,
    with_ids,
    with_objects,
    with_schemas,
    with_short_ids,
    with_text,
)
from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ChatFormatError

if TYPE_CHECKING:  # it imports transformers
    from toolgrpo.chat.turn_reader import TurnReader

_QUESTION: Message = {"role": "user", "content": "q"}
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")  # base models', which chat models say now and then
_TAIL = 16  # tokens: longer than the header of any assistant turn


class TemplateFormat:
    """A `ChatFormat` over a Hugging Face tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, family: Family, reader: TurnReader) -> None:
        self.name = family.name
        self.family = family
        self.call_text = family.form.call.text
        self.reader = reader
        self._tokenizer = tokenizer
        self._knows_developer = "developer" in str(tokenizer.chat_template)
        self._encoder = Encoder(tokenizer)
        self.control = control = self._encoder.control
        if family.ends[0] not in control:
            raise ChatFormatError(
                f"the {family.name} chat format ends a turn with {family.ends[0]}, which is not a single "
                f"token of this tokenizer; use a tokenizer of the model's own family"
            )
        self.text_of_end = family.ends[0]  # of the token that closes a turn
        ends = (*family.ends, *_ENDS_OF_TEXT, tokenizer.eos_token)
        self.stop_ids = tuple(dict.fromkeys(control[end] for end in ends if end in control))
        self._markers = {control[text]: Marker(text) for text in reader.markers if text in control}
        self._guard = TextGuard(control, for_template=True)
        self.bridge([self.stop_ids[0]], [{"role": "tool", "name": "f", "content": "r"}])  # says what is wrong, now

    @property
    def marker_ids(self) -> dict[str, int]:
        """Return the markers of calls that are one token here, by their text."""
        return {marker.text: one for one, marker in self._markers.items()}

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        return self._encoder.encode(self.render(messages, schemas, enable_thinking=enable_thinking))

    def bridge(
        self,
        ids: Sequence[int],
        tool_messages: Sequence[Message],
        *,
        messages: Sequence[Message] = (),
        schemas: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> list[int]:
        row = self._guard.value(messages or [_QUESTION])
        if [message["role"] for message in tool_messages] == ["user"]:
            following = self._after_answer(
                row, self._guard.value(tool_messages), self._guard.value(schemas), enable_thinking
            )
            return following[1:] if self._has_ended(ids, following[0]) else following
        answers = [
            self._guard.value({**message, "name": message.get("name") or "unknown"}) for message in tool_messages
        ]
        shown = self._guard.value(schemas) or [_schema(name) for name in {answer["name"]: None for answer in answers}]
        answers = with_ids([_call_turn(answers), *answers])[1:]
        text = ""
        # A template that prints one call per message: answers in a row that have one name may answer one call.
        by_name = itertools.groupby(answers, key=lambda answer: answer["name"])
        for answered in [list(run) for _, run in by_name] if self.family.one_call else [answers]:
            asks = answered[-1] is answers[-1]
            text += self._after_calls(row, answered, shown, enable_thinking=enable_thinking, ask=asks)
        following = self._encoder.encode(self.text_of_end + text)
        return following[1:] if self._has_ended(ids, self.stop_ids[0]) else following

    def _has_ended(self, ids: Sequence[int], end: int) -> bool:
        """Return whether what the template prints at the end of a turn is said already."""
        last = ids[-1] if ids else None
        return last == end or (last in self.stop_ids and not self.family.end_opens_results)

    def _after_answer(
        self,
        row: Sequence[Message],
        said: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        enable_thinking: bool | None,
    ) -> list[int]:
        """Return the end of a turn without calls, and what the template prints behind it when the user has said this."""
        answer: Message = {"role": "assistant", "content": MARK}
        text = self._apply([*row, answer, *said], schemas, enable_thinking=enable_thinking)
        following = self._encoder.encode(text[text.rfind(MARK) + 1 :])
        end = next((place for place, token in enumerate(following) if token in self.stop_ids), None)
        if MARK not in text or end is None:
            ends = " or ".join(self._decode([end]) for end in self.stop_ids)
            raise ChatFormatError(
                f"the {self.name} chat format cannot continue after a user's message: the model ends an answer with {ends}, but "
                f"after an answer that a user replies to, its chat template prints {self._decode(following[:4])!r}, so "
                f"sampled tokens would have to change. Leave out `user_turns` and next_user_message, or use a model of another "
                f"family."
            )
        return following[end:]

    def _after_calls(
        self,
        row: Sequence[Message],
        answers: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None,
        ask: bool,
    ) -> str:
        """Return what the template prints behind the end of the turn that these answer; all is guarded already."""
        turn = _call_turn(answers[:1] if self.family.one_call else answers)
        text = self._apply([*row, turn, *answers], schemas, enable_thinking=enable_thinking, ask=ask)
        place = text.find(self.text_of_end, text.rfind(MARK)) if MARK in text else -1
        if place < 0:
            raise ChatFormatError(
                f"the chat template of the {self.name} format does not print a tool call and {self.text_of_end} after it, so "
                f"toolgrpo cannot tell where results belong. Set tokenizer.chat_template to one that prints `tool_calls`."
            )
        return text[place + len(self.text_of_end) :]

    def parse(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> ParsedTurn:
        """Take a turn apart; `before` are ids that it follows, which tell whether the prompt has opened its thinking."""
        closed = bool(ids) and ids[-1] in self.stop_ids
        thinking = self._decode(before[-_TAIL:]).rstrip().endswith(self.reader.thinking)
        return self.reader.read(self._segments(ids[:-1] if closed else ids), closed=closed, thinking=thinking)

    def render(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
        ask: bool = True,
    ) -> str:
        """Return the template's text, guarded; `ask` adds the header of the next assistant turn."""
        return self._apply(
            self._guard.value(messages), self._guard.value(schemas), enable_thinking=enable_thinking, ask=ask
        )

    def guarded(self, text: str) -> str:
        """Return text that spells no control token, to put beside what `render` gave."""
        return self._guard.text(text)

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of what `render` gave, or of a part of it."""
        return self._encoder.encode(rendered)

    def shaped(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Mapping[str, Any]]]:
        """Return the conversation and the schemas as the chat template of this family takes them."""
        if not self._knows_developer:  # most templates print nothing of what it says
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        shaped = with_ids(with_objects(messages, self.family.reasoning_key))
        if self.family.short_ids:
            shaped = with_short_ids(shaped)
        if self.family.one_call:
            shaped = one_call_each(shaped)
        if self.family.results_inside:
            shaped = results_inside(shaped)
        if self.family.arguments_as_text:
            shaped = with_text(shaped)
        if self.family.calls_in_text:
            shaped = calls_in_text(shaped)
        if not self.family.shows_tools:
            return with_schemas(shaped, schemas), []
        if not self.family.knows_tools:
            return tools_as_text(shaped, schemas, system=self.family.knows_system), []
        return shaped, list(schemas)

    def _apply(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None,
        ask: bool = True,
    ) -> str:
        """Return the template over messages that are guarded already."""
        shaped, tools = self.shaped(messages, schemas)
        kwargs: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            text: str = self._tokenizer.apply_chat_template(
                shaped, tools=tools or None, tokenize=False, add_generation_prompt=ask, **kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            if not messages:
                raise ChatFormatError(
                    f"the chat template of the {self.name} format cannot begin a conversation with an assistant message; put "
                    f"a system or user message before it"
                ) from error
            roles = ", ".join(message["role"] for message in shaped)
            without, cure = "", "Change the row, or set tokenizer.chat_template to one that prints it"
            if not tools:
                without = " without tools"
                variant = (
                    "If it is the variant for tools of a model with several, give them all by name: "
                    'tokenizer.chat_template = {"default": ..., "tool_use": ...}'
                )
                cure = ". ".join((cure, variant))
            raise ChatFormatError(
                f"the chat template of the {self.name} format cannot print a conversation of the roles {roles}{without}. "
                f"{cure}. The template says: {error}"
            ) from error
        return with_marks(text)

    def _segments(self, ids: Sequence[int]) -> Iterator[Segment]:
        """Give text and markers in order; a marker that is one token is only ever recognised by its id."""
        markers, start = self._markers, 0
        for position in [place for place, token in enumerate(ids) if token in markers]:
            if position > start:
                yield self._decode(ids[start:position])
            yield markers[ids[position]]
            start = position + 1
        if start < len(ids):
            yield self._decode(ids[start:])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids)


def _call_turn(answers: Sequence[Message]) -> Message:
    """Return a turn that makes the calls which these answer, with a mark where it ends."""
    calls = [
        {
            "type": "function",
            "function": {"name": answer["name"], "arguments": {"mark": MARK}},
            **({"id": answer["tool_call_id"]} if "tool_call_id" in answer else {}),
        }
        for answer in answers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _schema(name: str) -> dict[str, Any]:
    """Return a tool of this name; some templates print no calls where no tools are offered."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
