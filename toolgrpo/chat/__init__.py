"""Chat formats: messages to token ids and back, one file a family group (`base.py` says what a format is)."""

from __future__ import annotations

from typing import Any

from toolgrpo.chat.base import ChatFormat, ParsedTurn
from toolgrpo.chat.messages import assistant_message, tool_message
from toolgrpo.errors import ChatFormatError

__all__ = ["ChatFormat", "ParsedTurn", "assistant_message", "resolve_format", "tool_message"]


def resolve_format(tokenizer: Any) -> ChatFormat:
    """The chat format of this tokenizer's template."""
    from toolgrpo.chat.hermes import HermesFormat

    template = tokenizer.chat_template
    if not template:
        raise ChatFormatError("the tokenizer has no chat template; set tokenizer.chat_template, or use a chat model")
    if "<tool_call>" in template and "<|im_end|>" in template:
        return HermesFormat(tokenizer, name="qwen3" if "<think>" in template else "qwen2.5")
    raise ChatFormatError("this chat template is of no supported family (Qwen2.5, Qwen3)")
