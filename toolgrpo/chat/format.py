"""The chat format of every family: the model's own template renders, a reader of its response template reads.

The bridge is what the template prints between the end of an assistant turn and the header of the next one, taken from a
short conversation that holds just these results. Nothing that was sampled is rendered, and the cost does not grow with
the conversation. `proof.py` shows, before any training, that the same text follows in a longer conversation too.

Not covered: templates that hide what was said before. The bridge never renders history, so nothing that was sampled is
lost; such a model sees more of its own thinking than its template would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from toolgrpo.chat.attempts import Marker, Reader, Segment
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.encoding import MARK, Encoder, Guard
from toolgrpo.chat.families import Family
from toolgrpo.chat.message_shapes import one_call_each, results_inside, spelled_out, with_objects
from toolgrpo.errors import ChatFormatError
from toolgrpo.trajectory import Message

__all__ = ["TemplateFormat"]

_QUESTION: Message = {"role": "user", "content": "q"}
_TAIL = 16  # tokens: longer than the header of any assistant turn


class TemplateFormat:
    """A `ChatFormat` over a Hugging Face tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, family: Family, reader: Reader) -> None:
        self.name = family.name
        self.family = family
        self.reader = reader
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self.control = control = self._encoder.control
        if family.ends[0] not in control:
            raise ChatFormatError(
                f"the {family.name} chat format ends a turn with {family.ends[0]}, which is no single token of this "
                f"tokenizer; use a tokenizer of the model's own family"
            )
        self._close = family.ends[0]
        self.stop_ids = tuple(control[end] for end in family.ends if end in control)
        self._markers = {control[text]: Marker(text) for text in reader.markers if text in control}
        self._guard = Guard(control)
        self.bridge([self.stop_ids[0]], [{"role": "tool", "name": "f", "content": "r"}])  # says what is wrong, now

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        return self._encoder.encode(self.render(messages, schemas, enable_thinking=enable_thinking))

    def bridge(
        self, ids: Sequence[int], tool_messages: Sequence[Message], *, enable_thinking: bool | None = None
    ) -> list[int]:
        names = [self._guard.text(message.get("name") or "unknown") for message in tool_messages]
        calls = [_call(name, {}) for name in names[:-1]] + [_call(names[-1], {"mark": MARK})]
        if self.family.one_call:
            calls = [_call(names[0], {"mark": MARK})]
        guarded = self._guard.value(tool_messages)
        answers = [{**message, "name": name} for message, name in zip(guarded, names, strict=True)]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self._apply([_QUESTION, turn, *answers], [], enable_thinking=enable_thinking)
        place = text.find(self._close, text.find(MARK)) if MARK in text else -1
        if place < 0:
            raise ChatFormatError(
                f"the chat template of the {self.name} format does not print a tool call and {self._close} after it, so "
                f"toolgrpo cannot tell where results belong. Set tokenizer.chat_template to one that prints `tool_calls`."
            )
        last = ids[-1] if ids else None
        ended = last == self.stop_ids[0] or (last in self.stop_ids and not self.family.end_opens_results)
        return self._encoder.encode(text[place + len(self._close) if ended else place :])

    def parse(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> ParsedTurn:
        """`before` are ids that the turn follows; they tell whether the prompt has already opened its thinking."""
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
        """The template's text, guarded; `ask` adds the header of the next assistant turn."""
        return self._apply(
            self._guard.value(messages), self._guard.value(schemas), enable_thinking=enable_thinking, ask=ask
        )

    def encode(self, rendered: str) -> list[int]:
        """Ids of what `render` gave, or of a part of it."""
        return self._encoder.encode(rendered)

    def _apply(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None,
        ask: bool = True,
    ) -> str:
        """The template over messages that are guarded already."""
        messages = with_objects(messages, self.family.reasoning_key)
        if self.family.one_call:
            messages = one_call_each(messages)
        if self.family.results_inside:
            messages = results_inside(messages)
        if not self.family.knows_tools:
            messages, schemas = spelled_out(messages, schemas, system=self.family.knows_system), []
        kwargs: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(schemas) or None, tokenize=False, add_generation_prompt=ask, **kwargs
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ChatFormatError(
                f"the chat template of the {self.name} format cannot print a conversation of the roles {roles}: {error}. "
                f"Change the row, or set tokenizer.chat_template to one that prints it."
            ) from error
        return text

    def _segments(self, ids: Sequence[int]) -> Iterator[Segment]:
        """Text and markers in order; a marker that is one token is only ever recognised by its id."""
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


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
