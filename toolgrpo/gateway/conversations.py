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

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Found(Generic[P]):
    """The place up to which a conversation is known, and what follows it there."""

    place: P | None
    following: tuple[Message, ...]
    other_tools: bool  # it would be known further, were other tools offered
    conversation: bytes  # the key of all its messages
    offered: bytes  # that of the tools and the thinking switch


@dataclass(slots=True)
class Conversations(Generic[P]):
    """Places by the messages that lead to them."""

    _places: dict[tuple[bytes, bytes], P] = field(default_factory=dict)
    _without_tools: set[bytes] = field(default_factory=set)

    def remember(self, found: Found[P], said: Message, place: P) -> None:
        """Note that a turn, said to what was found, ended at this place."""
        key = _digest(found.conversation, _compared(said))
        self._places[key, found.offered] = place
        self._without_tools.add(key)

    def find(
        self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], thinking: bool | None
    ) -> Found[P]:
        """Return the latest place that these messages lead to."""
        offered = _digest(b"", [list(schemas), thinking])
        keys = _keys(messages)
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] == "assistant" and (keys[length], offered) in self._places:
                place = self._places[keys[length], offered]
                return Found(place, tuple(messages[length:]), other_tools=False, conversation=keys[-1], offered=offered)
        known = any(key in self._without_tools for key in keys[1:])
        return Found(None, tuple(messages), other_tools=known, conversation=keys[-1], offered=offered)


def _keys(messages: Sequence[Message]) -> list[bytes]:
    """Return a key for each beginning of a conversation, the empty one first."""
    keys = [b""]
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
