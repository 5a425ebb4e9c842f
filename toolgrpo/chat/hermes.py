"""Qwen3, Qwen2.5 and every ChatML model that writes tool calls as `<tool_call>{JSON}</tool_call>`.

`prompt` renders the tokenizer's own template; the bridge is cut out of the same template once, at construction. `parse`
finds the markers by their ids, so text that merely looks like a marker is text.

Not covered here: templates that drop what was said before (the bridge never renders history, so nothing is lost, but
such a model sees more of its own thinking than its template would show it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.encoding import Encoder, Placeholders
from toolgrpo.errors import ChatFormatError
from toolgrpo.trajectory import AttemptStatus, CallAttempt, Message

__all__ = ["HermesFormat"]

_END = "<|im_end|>"


class HermesFormat:
    """A `ChatFormat` over a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        control = self._encoder.control
        missing = [token for token in (_END, "<tool_call>", "</tool_call>") if token not in control]
        if missing:
            raise ChatFormatError(
                f"the {name} chat format needs {', '.join(missing)} as single tokens, which this tokenizer lacks; "
                f"use a tokenizer of the model's own family"
            )
        self._end = control[_END]
        self._call, self._call_end = control["<tool_call>"], control["</tool_call>"]
        self._think, self._think_end = control.get("<think>"), control.get("</think>")
        self.stop_ids = (self._end,)
        self._bridge_head, self._bridge_between, self._bridge_tail = self._cut_bridge()

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
        return self._encoder.encode([*parts, (self._bridge_tail, False)])

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        closed = bool(ids) and ids[-1] == self._end
        body = list(ids[:-1] if closed else ids)
        reasoning, body = self._take_reasoning(body)
        content: list[str] = []
        attempts: list[CallAttempt] = []
        while self._call in body:
            start = body.index(self._call)
            content.append(self._decode(body[:start]))
            rest = body[start + 1 :]
            if self._call_end in rest:
                end = rest.index(self._call_end)
                attempts.append(_attempt(self._decode(rest[:end])))
                body = rest[end + 1 :]
            else:
                attempts.append(_unclosed(self._decode(rest)))
                body = []
        content.append(self._decode(body))
        text = "".join(content).strip("\n") if attempts or reasoning is not None else "".join(content)
        return ParsedTurn(text, reasoning, tuple(attempts), closed)

    def _take_reasoning(self, body: list[int]) -> tuple[str | None, list[int]]:
        if self._think is None or self._think not in body:
            return None, body
        start = body.index(self._think)
        rest = body[start + 1 :]
        end = rest.index(self._think_end) if self._think_end in rest else len(rest)
        return self._decode(rest[:end]).strip("\n"), [*body[:start], *rest[end + 1 :]]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _render(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> Iterator[tuple[str, bool]]:
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
        messages: list[Message] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "name": "f", "content": "first result"},
            {"role": "tool", "name": "f", "content": "second result"},
        ]
        parts = list(self._render(messages, []))
        contents = [index for index, (text, is_content) in enumerate(parts) if is_content and text != "q"]
        if [parts[index][0] for index in contents] != ["first result", "second result"] or contents[-1] + 1 >= len(
            parts
        ):
            raise ChatFormatError(
                f"the chat template of the {self.name} format does not print tool results in order; toolgrpo cannot "
                f"extend a conversation with it. Set tokenizer.chat_template to one that renders role `tool`."
            )
        before = parts[contents[0] - 1][0]
        head = before[before.rindex(_END) + len(_END) :]
        return head, parts[contents[0] + 1][0], parts[contents[-1] + 1][0]


def _attempt(raw: str) -> CallAttempt:
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return CallAttempt(AttemptStatus.INVALID_JSON, raw, detail=f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return CallAttempt(AttemptStatus.MISSING_NAME, raw, detail='a call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return CallAttempt(
                AttemptStatus.INVALID_JSON, raw, call["name"], detail=f"the arguments are not valid JSON: {error}"
            )
    if not isinstance(arguments, dict):
        return CallAttempt(AttemptStatus.BAD_ARGUMENTS, raw, call["name"], detail="arguments must be a JSON object")
    return CallAttempt(AttemptStatus.OK, raw, call["name"], arguments)


def _unclosed(raw: str) -> CallAttempt:
    return CallAttempt(AttemptStatus.UNCLOSED, raw, detail="the call was not closed with </tool_call>")
