"""Conversations that requests repeat: where in what was said one goes on.

A client sends all messages each time. Up to the last assistant turn that it repeats, they stand for
tokens that are known exactly, and which are never made from the messages again. `Conversations`
remembers, for each turn that was said, the messages up to it, and finds the latest such place.

Messages are compared as clients hand them on: without reasoning (which many drop), with an
assistant's text stripped, and with its calls by name and arguments. Tools and the thinking switch
are part of a conversation: templates print them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from toolgrpo.trajectory import Message

__all__ = ["Conversations", "Found"]

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Found(Generic[P]):
    """The place up to which a conversation is known, and what follows it there."""

    place: P | None
    following: tuple[Message, ...]
    other_tools: bool  # it would be known further, were other tools offered


@dataclass(slots=True)
class Conversations(Generic[P]):
    """Places by the messages that lead to them."""

    _places: dict[bytes, P] = field(default_factory=dict)
    _without_tools: set[bytes] = field(default_factory=set)

    def remember(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        thinking: bool | None,
        place: P,
    ) -> None:
        """Note that a turn, the last of these messages, ended at this place."""
        self._places[_keys(messages, schemas, thinking)[-1]] = place
        self._without_tools.add(_keys(messages)[-1])

    def find(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], thinking: bool | None
    ) -> Found[P]:
        """Return the latest place that these messages lead to."""
        keys = _keys(messages, schemas, thinking)
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] == "assistant" and keys[length] in self._places:
                return Found(self._places[keys[length]], tuple(messages[length:]), other_tools=False)
        bare = _keys(messages)
        return Found(None, tuple(messages), any(key in self._without_tools for key in bare[1:]))


def _keys(
    messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]] = (), thinking: bool | None = None
) -> list[bytes]:
    """Return a key for each beginning of a conversation, the empty one first."""
    keys = [_digest(b"", [list(schemas), thinking])]
    for message in messages:
        keys.append(_digest(keys[-1], _compared(message)))
    return keys


def _compared(message: Message) -> list[Any]:
    text = message["content"]
    if message["role"] != "assistant":
        return [message["role"], text]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return ["assistant", text.strip(), [[call["name"], call["arguments"]] for call in calls]]


def _digest(before: bytes, value: Any) -> bytes:
    written = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode(errors="surrogatepass")
    return hashlib.blake2b(before + written, digest_size=16).digest()
