"""Conversations with tool calls, as tokens with a mask on what the assistant says.

The mask comes from where it is certain: TRL's training template of the model family (generation markers), or else from
rendering the conversation turn by turn, where every rendering has to begin with the one before. A template that allows
neither is refused.

A row is `{"messages": [...]}` or `{"prompt": [...], "completion": [...]}` in the OpenAI form; `tools` may hold schemas of
its own. With prompt and completion, too, every assistant turn is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl.chat_template_utils import get_training_chat_template

from toolgrpo.data.files import read_file
from toolgrpo.errors import ChatFormatError, DataError
from toolgrpo.sft.batches import Example
from toolgrpo.trajectory import Message

__all__ = ["ConversationEncoder", "read_conversations"]

Schemas = Sequence[Mapping[str, Any]]


def read_conversations(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file, each as {"messages": ..., "tools": schemas or None}; a row that cannot be used is an error."""
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"there is no file {path}; give a .jsonl file of conversations, one {{'messages': [...]}} a line"
        )
    rows = list(_checked(path))
    if not rows:
        raise DataError(f"{path} has no conversations; one {{'messages': [...]}} a line is expected")
    return rows


def _checked(path: Path) -> Iterator[dict[str, Any]]:
    for row in read_file(path):
        if row.columns is None:
            raise DataError(f"{row.where}: {row.problem}")
        columns = row.columns
        messages = columns.get("messages")
        if messages is None and isinstance(columns.get("prompt"), list) and isinstance(columns.get("completion"), list):
            messages = [*columns["prompt"], *columns["completion"]]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise DataError(
                f"{row.where}: no conversation; `messages` (or `prompt` and `completion`) must be a list of "
                f"messages with a role, got the columns {', '.join(columns)}"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{row.where}: no assistant message, so there is nothing to learn from")
        yield {"messages": messages, "tools": columns.get("tools")}


class ConversationEncoder:
    """Conversations to examples, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ChatFormatError(
                f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template; "
                "only chat models can be taught conversations"
            )
        self._tokenizer = tokenizer
        self._template = _template_with_markers(tokenizer)

    def __call__(self, messages: Sequence[Message], schemas: Schemas | None = None) -> Example:
        tools = list(schemas) if schemas else None
        example = self._by_turns(messages, tools) if self._template is None else self._by_markers(messages, tools)
        if not any(example.mask):
            raise ChatFormatError(
                "the chat template renders no assistant tokens of this conversation; nothing can be learnt"
            )
        return example

    def _by_markers(self, messages: Sequence[Message], tools: list[Any] | None) -> Example:
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = rendered["input_ids"]
        return Example(tuple(ids), _until_end_of_turn(ids, rendered["assistant_masks"], self._tokenizer.eos_token_id))

    def _by_turns(self, messages: Sequence[Message], tools: list[Any] | None) -> Example:
        ids: list[int] = []
        mask: list[int] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:index], tools, header=True)
            after = self._rendered(messages[: index + 1], tools, header=False)
            if before[: len(ids)] != ids or after[: len(before)] != before:
                raise ChatFormatError(
                    f"the chat template renders the turns before message {index} differently once it is there, so the "
                    "assistant's tokens cannot be told apart. Use a template with generation markers."
                )
            mask += [0] * (len(before) - len(ids)) + [1] * (len(after) - len(before))
            ids = after
        return Example(tuple(ids), _until_end_of_turn(ids, mask, self._tokenizer.eos_token_id))

    def _rendered(self, messages: Sequence[Message], tools: list[Any] | None, *, header: bool) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=header, return_dict=False
        )
        return list(ids)


def _template_with_markers(tokenizer: Any) -> str | None:
    """The family's training template, or the tokenizer's own if it has markers, or None."""
    try:
        template: str | None = get_training_chat_template(processing_class=tokenizer)
    except ValueError:  # TRL does not know this family
        template = None
    if template is None and "{% generation" in tokenizer.chat_template.replace("{%-", "{%"):
        template = tokenizer.chat_template
    return template


def _until_end_of_turn(ids: Sequence[int], mask: Sequence[int], end: int) -> tuple[int, ...]:
    """The mask without what templates put after the end-of-turn token, such as a line break: no model says that."""
    kept = list(mask)
    for index in range(1, len(ids)):
        if kept[index] and mask[index - 1] and (ids[index - 1] == end or not kept[index - 1]):
            kept[index] = 0
    return tuple(kept)
