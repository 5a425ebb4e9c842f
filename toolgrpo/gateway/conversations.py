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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from toolgrpo.chat.base import tool_message
from toolgrpo.engines.base import FinishReason, Sample
from toolgrpo.episode.segments import Segment, first_columns
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import RUNNABLE, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import Message, StopReason, Trajectory, Turn
from toolgrpo.gateway.openai_forms import ModelAnswer, read_arguments
from toolgrpo.rollout.limits import TextTokenizer

# The sequences of tokens of one session, each of which only grows.
#
# A sequence is a segment of the episode to be. The turn that was said last stays open until what came back
# for its calls is known. `joined` makes the episode of all sequences.


@dataclass(slots=True, eq=False)
class KnownSequence:
    """One sequence, and what its prompt was made of, as a bridge wants to know it."""

    ledger: Ledger
    messages: Sequence[Message] = ()
    schemas: Sequence[Mapping[str, Any]] = ()
    thinking: bool | None = None
    parent: KnownSequence | None = None  # that it branched off
    busy: bool = False  # a turn of it is being sampled
    open_turn: Turn | None = None

    @property
    def ids(self) -> list[int]:
        """Return the prompt and everything after it. Do not change it."""
        return self.ledger.all_ids

    def goes_on_in(self, ids: Sequence[int]) -> bool:
        """Return whether these tokens begin with this sequence, and go on."""
        own = self.ids
        return not self.busy and len(own) < len(ids) and list(ids[: len(own)]) == own


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Place where a turn ended."""

    sequence: KnownSequence
    n_ids: int  # of the sequence, prompt included
    calls: Mapping[str, CallAttempt]  # by the ids that the client was given
    attempts: Sequence[CallAttempt] = ()  # of a turn with calls, unreadable ones too

    def answers(self, following: Sequence[Message]) -> list[tuple[CallAttempt | None, Message]]:
        """Return what a client sent, in the order of the turn's calls: one that it could not be given is answered for it."""
        given: defaultdict[int, list[Message]] = defaultdict(list)
        for message in following:
            given[id(self.calls.get(str(message.get("tool_call_id"))))].append(message)
        pairs: list[tuple[CallAttempt | None, Message]] = []
        for attempt in self.attempts:
            broken = tool_message(attempt.name, f"Error: {attempt.detail or 'a malformed call'}")
            said = given[id(attempt)] if attempt.status in RUNNABLE else [broken]
            pairs += [(attempt, message) for message in said]
        return [*pairs, *((None, message) for message in given[id(None)])]


@dataclass(frozen=True, slots=True)
class Start:
    """Start of the sampling for a request: a sequence, and the tokens between its end and the next turn."""

    sequence: KnownSequence
    context: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()  # what the tokens stand for, as a reward reads it
    results: tuple[ToolResult, ...] = ()
    user: str | None = None  # what a user said to the answer that the sequence ended with
    answered: tuple[KnownSequence, Turn, tuple[ToolResult, ...]] | None = None  # a turn that the prompt shows answered
    fork: str = ""  # why the sequence is new, if it is


def answer_to(attempt: CallAttempt | None, message: Message) -> Message:
    """Return what a client sent for a call, or said as the user, in the form that a bridge takes."""
    if message["role"] == "user":
        return {"role": "user", "content": message["content"]}
    if attempt is None:
        return tool_message(message.get("name"), message["content"])
    return tool_message(attempt.name, message["content"], attempt.call_id)


def results_of(
    turn: Turn | None, attempts: Sequence[CallAttempt | None], answers: Sequence[Message], now_s: float
) -> tuple[ToolResult, ...]:
    """Return the results of a turn's calls in their order, as far as they are known."""
    if turn is None:
        return ()
    began_s = turn.started_s + turn.duration_s
    given = {
        id(attempt): ToolResult(
            answer["content"],
            attempt.name,
            error=None if attempt.status in RUNNABLE else ToolErrorKind(attempt.status),
            started_s=began_s,
            duration_s=now_s - began_s,
        )
        for attempt, answer in zip(attempts, answers, strict=True)
        if attempt is not None
    }
    return tuple(given[id(attempt)] for attempt in takewhile(lambda attempt: id(attempt) in given, turn.attempts))


def _last_said(part: Trajectory) -> float:
    return part.turns[-1].started_s if part.turns else 0.0


def joined(sequences: Sequence[KnownSequence], reason: StopReason, **what: Any) -> Trajectory:
    """Return the episode whose segments these sequences are, in order of birth; its messages end with what was said last."""
    if len(sequences) == 1:
        return sequences[0].ledger.finish(reason, **what)
    parts = [sequence.ledger.finish(reason) for sequence in sequences]
    segments = [
        Segment(part.prompt_ids, part.ids, part.mask, part.logprobs, _number_of(sequence.parent, sequences[:number]))
        for number, (part, sequence) in enumerate(zip(parts, sequences, strict=True))
    ]
    columns = first_columns(segments)
    return Trajectory.of_segments(
        segments,
        messages=[message for part in sorted(parts, key=_last_said) for message in part.messages],
        turns=[
            replace(turn, start=turn.start + column, end=turn.end + column)
            for part, column in zip(parts, columns, strict=True)
            for turn in part.turns
        ],
        stop_reason=reason,
        **what,
    )


def _number_of(sequence: KnownSequence | None, sequences: Sequence[KnownSequence]) -> int | None:
    return next((number for number, one in enumerate(sequences) if one is sequence), None)


# Sampled turns as text: where a stop text ends them, and what a client repeats of them.


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample as far as a client is shown it."""

    sample: Sample
    stopped: bool = False  # by a stop text
    texts: tuple[str, ...] = ()  # of each token, if they are asked for

    def cut(self, n: int) -> Shown:
        """Return the first n tokens, which no text stopped."""
        logprobs = None if self.sample.logprobs is None else self.sample.logprobs[:n]
        cut = replace(self.sample, ids=self.sample.ids[:n], logprobs=logprobs, finish_reason=FinishReason.LENGTH)
        return Shown(cut, False, self.texts[:n])


def shown_of(sample: Sample, stop: Sequence[str], tokenizer: TextTokenizer, *, each: bool) -> Shown:
    """Return the sample up to and with the token that completes one of these texts, if one does.

    An engine that knew the texts would have stopped there. The end-of-turn token is gone then: the
    bridge that follows makes one up.
    """

    def holds_one(n_tokens: int) -> bool:
        shown = tokenizer.decode(list(sample.ids[:n_tokens]))
        return any(text in shown for text in stop)

    stopped = bool(stop) and holds_one(len(sample.ids))
    low, high = 1 if stopped else len(sample.ids), len(sample.ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_one(middle) else (middle + 1, high)
    if low < len(sample.ids):
        sample = Shown(sample).cut(low).sample
    return Shown(sample, stopped, tuple(tokenizer.decode([token]) for token in sample.ids) if each else ())


def text_before(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of these."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)] if places else text


def as_repeated(said: ModelAnswer) -> Message:
    """Return an answer as a client will repeat it."""
    message: Message = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": read_arguments(call.arguments)}} for call in said.calls
        ]
    return message


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys by which a conversation is known."""

    beginnings: Sequence[bytes]  # of it, the empty one first
    offered: bytes  # of the tools and the thinking switch


@dataclass(frozen=True, slots=True)
class Found:
    """The place up to which a conversation is known, and what follows it there."""

    turn_end: TurnEnd | None
    following: tuple[Message, ...]
    other_tools: bool  # it would be known further, were other tools offered
    keys: Keys


@dataclass(slots=True)
class Conversations:
    """Ends of turns by the messages that lead to them."""

    _turn_ends: dict[tuple[bytes, bytes], TurnEnd] = field(default_factory=dict)
    _without_tools: set[bytes] = field(default_factory=set)

    def remember(self, found: Found, said: Message, turn_end: TurnEnd) -> None:
        """Note that a turn, said to what was found, ended here."""
        key = _digest(found.keys.beginnings[-1], _compared(said))
        self._turn_ends[key, found.keys.offered] = turn_end
        self._without_tools.add(key)

    def find(self, messages: Sequence[Message], keys: Keys) -> Found:
        """Return the latest end of a turn that these messages, of these keys, lead to."""
        beginnings, offered = keys.beginnings, keys.offered
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] == "assistant" and (beginnings[length], offered) in self._turn_ends:
                turn_end = self._turn_ends[beginnings[length], offered]
                return Found(turn_end, tuple(messages[length:]), other_tools=False, keys=keys)
        known = any(key in self._without_tools for key in beginnings[1:])
        return Found(None, tuple(messages), other_tools=known, keys=keys)


def keys_of(messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], thinking: bool | None) -> Keys:
    """Return the keys of a conversation; long ones take time."""
    keys = [b""]
    for message in messages:
        keys.append(_digest(keys[-1], _compared(message)))
    return Keys(keys, _digest(b"", [list(schemas), thinking]))


def _compared(message: Message) -> list[Any]:
    text = message["content"]
    if message["role"] != "assistant":
        return [message["role"], text]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return ["assistant", text.strip(), [[call["name"], _whole(call["arguments"])] for call in calls]]


def _whole(value: Any) -> Any:
    """Return arguments with 2 for 2.0: a client that reads them and writes them again may know one kind of number."""
    if isinstance(value, Mapping):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(before: bytes, value: Any) -> bytes:
    written = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode(errors="surrogatepass")
    return hashlib.blake2b(before + written, digest_size=16).digest()
