"""Plain text that is continued as it is: no roles, no template, no tools.

What TRL does with prompts that are strings. A text becomes the ids that the tokenizer gives it, with
the special tokens it adds by itself; what is sampled ends with the tokenizer's end of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.errors import ChatFormatError
from toolgrpo.trajectory import Message

__all__ = ["RawText"]


class RawText:
    """A `ChatFormat` of one turn."""

    name = "raw text"
    call_text = ""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ChatFormatError("the tokenizer has no end of text, so raw completions would never end; set eos_token")
        self._tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = (tokenizer.eos_token_id,)

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        if len(messages) != 1 or schemas:
            self._refuse("a conversation" if len(messages) != 1 else "tools")
        return [int(token) for token in self._tokenizer(messages[0]["content"])["input_ids"]]

    def bridge(
        self,
        ids: Sequence[int],
        tool_messages: Sequence[Message],
        *,
        messages: Sequence[Message] = (),
        schemas: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool | None = None,
    ) -> list[int]:
        self._refuse("turns of a user" if tool_messages and tool_messages[0]["role"] == "user" else "tools")

    def parse(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> ParsedTurn:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return ParsedTurn(text, None, (), closed=bool(ids) and ids[-1] in self.stop_ids)

    def _refuse(self, what: str) -> NoReturn:
        raise ChatFormatError(f"raw text knows no {what.removeprefix('a ')}; set text_prompts to chat")
