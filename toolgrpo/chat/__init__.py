"""Chat formats: messages to token ids and back, for each model family (`base.py` says what a format is)."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from toolgrpo.chat.base import ChatFormat, ParsedTurn, assistant_message, tool_message
from toolgrpo.episode.trajectory import Message
from toolgrpo.errors import ChatFormatError, ModelError

__all__ = [
    "ChatFormat",
    "ParsedTurn",
    "assistant_message",
    "check_vocabulary",
    "prove_rows",
    "resolve_format",
    "tool_message",
    "with_template_arguments",
]


def check_vocabulary(tokenizer: Any, model_vocab_size: int) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for: they would fail in training."""
    if len(tokenizer) > model_vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} entries, but the model's vocabulary only {model_vocab_size}; use the "
            f"tokenizer that belongs to the model"
        )


def prove_rows(
    chat: ChatFormat, tokenizer: Any, prompts: Iterable[str | Sequence[Message]], *, user_turns: bool = False
) -> None:
    """Prove the format for the system messages of these rows; `ChatFormatError` where it does not hold.

    A template may read a switch from the system message. `user_turns`: users will speak in the middle
    of episodes. A format of somebody's own is taken as it is, if it does not refuse them itself.
    """
    from toolgrpo.chat.bridge_proof import prove_systems, prove_user_turns
    from toolgrpo.chat.format import TemplateFormat

    if isinstance(chat, TemplateFormat):
        first = (prompt[0] for prompt in prompts if prompt and not isinstance(prompt, str))
        told = (message["content"] for message in first if message.get("role") in ("system", "developer"))
        systems = [content for content in dict.fromkeys(told) if isinstance(content, str)]
        prove_systems(chat, tokenizer, systems)
        if user_turns:
            prove_user_turns(chat, tokenizer, systems)
    elif user_turns:
        said: Message = {"role": "user", "content": "x"}
        chat.bridge([chat.stop_ids[0]], [said], messages=[said])


def with_template_arguments(tokenizer: Any, arguments: Mapping[str, Any] | None) -> Any:
    """Return a tokenizer whose chat template always gets these arguments; what a call says comes first."""
    if not arguments:
        return tokenizer
    speaking = copy.copy(tokenizer)
    speaking.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **arguments)
    return speaking


def resolve_format(tokenizer: Any) -> ChatFormat:
    """Return the chat format of this tokenizer's template, proven on a conversation of each shape.

    A warning says so where the model is spoken to in other words than its template would print.
    Every turn is read as a response template says: the family's, or for any other template the
    tokenizer's or TRL's, if there is one. Where a family knows no tools but the tokenizer's
    response template does, that is tried first.
    """
    from toolgrpo.chat.families import family_of, refusal_of
    from toolgrpo.chat.response_template import family_format, own_call

    template = tokenizer.chat_template
    if isinstance(template, dict):  # named variants; apply_chat_template takes this one when tools are given
        names = ", ".join(template)
        template = template.get("tool_use", template.get("default"))
        if names and template is None:
            raise ChatFormatError(
                f"none of the tokenizer's chat templates ({names}) is named `default` or `tool_use`; set "
                f"tokenizer.chat_template to the one to use"
            )
    if not template:
        raise ChatFormatError("the tokenizer has no chat template; set tokenizer.chat_template, or use a chat model")
    family = family_of(template)
    if family is None:
        return _described(tokenizer, refusal_of(template))
    if not family.knows_tools and getattr(tokenizer, "response_template", None) is not None:
        with suppress(ChatFormatError):  # the chat template prints no calls, whatever is said of them
            return _described(tokenizer, "")
    chat = family_format(tokenizer, family)
    own = "" if chat.family.knows_tools else own_call(tokenizer)
    if own:
        warnings.warn(
            f"the {chat.name} chat format uses Hermes' form of calls with this model: {chat.call_text!r}, where its chat "
            f"template prints {own!r}. The model has to learn this form, or see it in the prompt. To "
            f"use the model's own form, set tokenizer.response_template to one that describes its calls.",
            stacklevel=2,
        )
    return chat


def _described(tokenizer: Any, refusal: str) -> ChatFormat:
    from toolgrpo.chat.response_template import described_format

    chat = described_format(tokenizer)
    if chat is None:
        raise ChatFormatError(
            f"this chat template is of no family that toolgrpo supports: {refusal}. Use a model of a supported family, set "
            f"tokenizer.response_template to one that says how its calls are read, or pass your own format as `chat=` to "
            f"ToolGRPOTrainer."
        )
    return chat
