"""Qwen3, Qwen2.5 and every ChatML model: tool calls are `<tool_call>{JSON}</tool_call>`, results `<tool_response>`.

Two kinds of template share this file:

* one that knows tools (Qwen's) renders schemas and results itself, and its bridge is cut out of it once, at construction;
* one that does not (SmolLM2's) is given the schemas in the system message and the results in a user message, in Hermes'
  words, and renders those as it renders any text.

Likewise for the markers: where `<tool_call>` is one token it is found by its id, so text that only looks like it is text;
where it is ordinary text, it is found as text.

Not covered: templates that hide what was said before. The bridge never renders history, so nothing that was sampled is
lost; such a model sees more of its own thinking than its template would show it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.calls import Marker, read_turn
from toolgrpo.chat.encoding import Encoder, Placeholders
from toolgrpo.errors import ChatFormatError
from toolgrpo.trajectory import Message

__all__ = ["HermesFormat"]

_END = "<|im_end|>"
_MARKERS = re.compile("(" + "|".join(re.escape(marker.value) for marker in Marker) + ")")
_PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class HermesFormat:
    """A `ChatFormat` over a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, *, name: str, knows_tools: bool = True) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._knows_tools = knows_tools
        self._encoder = Encoder(tokenizer)
        control = self._encoder.control
        if _END not in control:
            raise ChatFormatError(
                f"the {name} chat format ends a turn with {_END}, which is no single token of this tokenizer; use a "
                f"tokenizer of the model's own family"
            )
        self._end = control[_END]
        self._markers = {control[marker.value]: marker for marker in Marker if marker.value in control}
        self.stop_ids = (self._end,)
        self._bridge_head, self._bridge_between, self._bridge_tail = self._cut_bridge()
        self._header = self._encoder.encode([(self._bridge_tail[self._bridge_tail.rindex("<|im_start|>") :], False)])
        self._no_thinking = self._find_no_thinking()

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        kwargs: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        return self._encoder.encode(self._render(messages, schemas, **kwargs))

    def bridge(self, ids: Sequence[int], tool_messages: Sequence[Message]) -> list[int]:
        parts: list[tuple[str, bool]] = [] if ids and ids[-1] == self._end else [(_END, False)]
        for number, message in enumerate(tool_messages):
            parts += [(self._bridge_between if number else self._bridge_head, False), (message["content"], True)]
        bridged = self._encoder.encode([*parts, (self._bridge_tail, False)])
        return bridged + self._no_thinking if self._was_told_not_to_think(ids) else bridged

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        closed = bool(ids) and ids[-1] == self._end
        return read_turn(self._segments(ids[:-1] if closed else ids), closed=closed)

    def _segments(self, ids: Sequence[int]) -> Iterator[str | Marker]:
        """Text and markers in order; a marker that is one token is only ever recognised by its id."""
        known = set(self._markers.values())
        start = 0
        for position, token in enumerate([*ids, None]):
            marker = None if token is None else self._markers.get(token)
            if marker is None and token is not None:
                continue
            text = self._decode(ids[start:position])
            for piece in _MARKERS.split(text) if len(known) < len(Marker) else [text]:
                by_text = next((m for m in Marker if m.value == piece and m not in known), None)
                if by_text is not None or piece:
                    yield by_text or piece
            if marker is not None:
                yield marker
            start = position + 1

    def _find_no_thinking(self) -> list[int]:
        """What the template puts after the header of an assistant turn that shall not think; empty if it knows nothing of it."""
        messages: list[Message] = [{"role": "user", "content": "q"}]
        thinking, quiet = self.prompt(messages, []), self.prompt(messages, [], enable_thinking=False)
        return quiet[len(thinking) :] if quiet[: len(thinking)] == thinking else []

    def _was_told_not_to_think(self, ids: Sequence[int]) -> bool:
        """Whether the turn at the end of `ids` was opened without thinking; looks at that turn only."""
        if not self._no_thinking:
            return False
        position = len(ids) - 1
        while position >= 0 and ids[position] != self._header[0]:
            position -= 1
        body = position + len(self._header)
        return position >= 0 and list(ids[body : body + len(self._no_thinking)]) == self._no_thinking

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _render(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> Iterator[tuple[str, bool]]:
        if not self._knows_tools:
            messages, schemas = _spelled_out(messages, schemas), []
        places = Placeholders()
        shown = [
            {**message, "content": places.put(message["content"])}
            if isinstance(message.get("content"), str) and message["role"] != "assistant"
            else message
            for message in messages
        ]
        text = self._tokenizer.apply_chat_template(
            shown, tools=list(schemas) or None, tokenize=False, add_generation_prompt=True, **kwargs
        )
        return places.split(text)

    def _cut_bridge(self) -> tuple[str, str, str]:
        """(before the first result, between two results, after the last) out of the template itself."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        first, second = "first result", "second result"
        results = [{"role": "tool", "name": "f", "content": text} for text in (first, second)]
        assistant: Message = {"role": "assistant", "content": "", "tool_calls": [call, call]}
        parts = list(self._render([{"role": "user", "content": "q"}, assistant, *results], []))
        where = [
            index for index, (text, is_content) in enumerate(parts) if is_content and (first in text or second in text)
        ]
        if not self._knows_tools and len(where) == 1:  # both results stand in one user message
            head, between, tail = re.split(f"{first}|{second}", parts[where[0]][0])
            before, after = parts[where[0] - 1][0], parts[where[0] + 1][0]
            return before[before.rindex(_END) + len(_END) :] + head, between, tail + after
        if [parts[index][0] for index in where] != [first, second] or where[-1] + 1 >= len(parts):
            raise ChatFormatError(
                f"the chat template of the {self.name} format does not print tool results in order; toolgrpo cannot "
                f"extend a conversation with it. Set tokenizer.chat_template to one that renders role `tool`."
            )
        before = parts[where[0] - 1][0]
        return before[before.rindex(_END) + len(_END) :], parts[where[0] + 1][0], parts[where[-1] + 1][0]


def _spelled_out(messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation for a template that knows only system, user and assistant texts."""
    spelled: list[Message] = []
    if schemas:
        preamble = _PREAMBLE.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))
        has_system = bool(messages) and messages[0]["role"] == "system"
        own = f"{messages[0]['content']}\n\n" if has_system else ""
        spelled.append({"role": "system", "content": own + preamble})
        messages = messages[1:] if has_system else messages
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            if spelled and spelled[-1].get("of_tools"):
                spelled[-1]["content"] += f"\n{response}"
            else:
                spelled.append({"role": "user", "content": response, "of_tools": True})
        elif message["role"] == "assistant":
            calls = [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message.get("tool_calls") or ()
            ]
            spelled.append(
                {"role": "assistant", "content": "\n".join([message.get("content") or "", *calls]).strip("\n")}
            )
        else:
            spelled.append(dict(message))
    return [{"role": message["role"], "content": message["content"]} for message in spelled]
