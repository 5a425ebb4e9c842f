"""Chat formats: messages to token ids and back, one file a family group (`base.py` says what a format is)."""

from __future__ import annotations

from typing import Any

from toolgrpo.chat.base import ChatFormat, ParsedTurn
from toolgrpo.chat.messages import assistant_message, tool_message
from toolgrpo.errors import ChatFormatError, ModelError

__all__ = ["ChatFormat", "ParsedTurn", "assistant_message", "check_vocabulary", "resolve_format", "tool_message"]


def check_vocabulary(tokenizer: Any, model_vocab_size: int) -> None:
    """A token the model has no embedding for would fail in the middle of training."""
    if len(tokenizer) > model_vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} entries, but the model's vocabulary only {model_vocab_size}; use the "
            f"tokenizer that belongs to the model"
        )


def resolve_format(tokenizer: Any) -> ChatFormat:
    """The chat format of this tokenizer's template, proven on a conversation of each shape."""
    from toolgrpo.chat.hermes import HermesFormat
    from toolgrpo.chat.proof import prove

    template = tokenizer.chat_template
    if not template:
        raise ChatFormatError("the tokenizer has no chat template; set tokenizer.chat_template, or use a chat model")
    if "<|im_start|>" not in template:
        raise ChatFormatError(
            "this chat template is of no family that toolgrpo supports yet: it prints no <|im_start|> (Qwen2.5, Qwen3 and other "
            "ChatML models do). Pass `chat=` to ToolGRPOTrainer for a format of your own."
        )
    foreign = next(
        (mark for mark in ("<function=", "<|tool_list_start|>", "<|vision_start|>") if mark in template), None
    )
    if foreign is not None:
        raise ChatFormatError(
            f"this chat template writes {foreign}, a form that toolgrpo does not read yet (it reads JSON calls of text models, "
            f"as Qwen2.5's and Qwen3's). Use such a model, or pass `chat=` to ToolGRPOTrainer for a format of your own."
        )
    if "<tool_call>" in template:
        chat = HermesFormat(tokenizer, name="qwen3" if "<think>" in template else "qwen2.5")
    else:
        chat = HermesFormat(tokenizer, name="chatml", knows_tools=False)
    prove(chat, tokenizer.decode, frozenset(tokenizer.added_tokens_decoder))
    return chat
