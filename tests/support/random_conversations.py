"""Random conversations, and what becomes of them: ids beside the tokenizer's own, calls beside those that were made.

A conversation is a row, one to three rounds of calls and results, and an answer. Its texts are of the kinds that hurt:
unicode composed and decomposed, emoji with joiners, CRLF, tabs, white space at the edges, nothing, nested JSON, the
beginnings and ends of markers. For each of its prompts and bridges the ids are compared with those that the tokenizer
gives for the text of the model's own template, in which no text is marked.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.chat.base import tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import Message

_TEXTS = (
    *("a", "two words", "Grüße aus Köln", "Zu\u0308rich e\u0301", "你好，世界"),
    *("\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467", "line\r\nline", "tab\there"),
    *("  space at the edges  ", "\n\n\nbreaks\n\n\n", "x <", "|> x", "50% & 3 < 4", "{} [] ()", "C:\\temp\\new"),
    *('say "hi"', "it's", "`code` **bold**", "ﷺ ﷽", "1,234.50 €", "#### 42", "a\u00a0b\u2028c", "<b>x"),
    *("न\u0940ति", "0012", "true", "null", "e^{i\\pi}", "\t\t\tx\t", "...", "https://a.b/c?d=e&f=g", "𝔘𝔫𝔦"),
    "ı İ ß ẞ",
)
_NAMES = ("look_up", "search_for", "weather")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, what is called and answered in each round, and how thinking is set."""

    row: tuple[Message, ...]
    schemas: tuple[Mapping[str, Any], ...]
    rounds: tuple[tuple[Message, tuple[Message, ...]], ...]
    enable_thinking: bool | None


@dataclass(slots=True)
class Tally:
    """What was compared, and what differed."""

    conversations: int = 0
    tokens: int = 0
    drifted: int = 0  # tokens of prompts and bridges that are not the tokenizer's own
    bridges: int = 0
    calls: int = 0
    misread: int = 0
    shown: list[str] = field(default_factory=list)  # the first few differences


def random_conversation(draw: random.Random, chat: TemplateFormat) -> Conversation:
    """Return a conversation that the chat template of this format can print."""
    family = chat.family
    row: list[Message] = [{"role": "user", "content": _text(draw)}]
    if family.knows_system and draw.random() < 0.6:
        switch = draw.choice(["", "", "/no_think ", "/think "])
        row = [{"role": "system", "content": f"{switch}{_text(draw)}"}, *row]
    if draw.random() < 0.3:
        row += [{"role": "assistant", "content": _text(draw, empty=False)}, {"role": "user", "content": _text(draw)}]
    rounds = []
    for _ in range(draw.randint(1, 3)):
        n_calls = 1 if family.one_call else draw.choice([1, 1, 2, 3])
        names = [draw.choice(_NAMES) for _ in range(n_calls)]
        numbers = [f"c{draw.randrange(10**8):08d}" for _ in names]
        calls = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": _arguments(draw, chat)}}
            for name, number in zip(names, numbers, strict=True)
        ]
        turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        if draw.random() < 0.3:
            turn["reasoning_content"] = _text(draw, empty=False).strip() or "hm"
        results = [tool_message(name, _text(draw), number) for name, number in zip(names, numbers, strict=True)]
        rounds.append((turn, tuple(results)))
    schemas = [_schema(name, _text(draw, empty=False)) for name in _NAMES[: draw.randint(1, 3)]]
    return Conversation(tuple(row), tuple(schemas), tuple(rounds), draw.choice([None, None, True, False]))


def tally(chat: TemplateFormat, tokenizer: Any, n: int, seed: str) -> Tally:
    """Compare `n` conversations."""
    draw, counts = random.Random(seed), Tally()
    for _ in range(n):
        _compare(chat, tokenizer, random_conversation(draw, chat), counts)
    return counts


def _compare(chat: TemplateFormat, tokenizer: Any, told: Conversation, counts: Tally) -> None:
    counts.conversations += 1
    row, schemas, thinking = list(told.row), list(told.schemas), told.enable_thinking
    prompt = chat.prompt(row, schemas, enable_thinking=thinking)
    _count(counts, "prompt", prompt, _own(chat, tokenizer, row, schemas, thinking))
    messages = row
    given: dict[str, Any] = {"messages": row, "schemas": schemas, "enable_thinking": thinking}
    for turn, results in told.rounds:
        asked = _own(chat, tokenizer, messages, schemas, thinking)
        messages = [*messages, turn, *results]
        whole = _own(chat, tokenizer, messages, schemas, thinking)
        start = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), len(asked))
        # From behind: some templates print what stood before otherwise when something follows.
        end = len(whole) - len(chat.bridge([chat.stop_ids[0]], results, **given))
        attempts = _read(chat, turn, whole[start:end], whole[:start], counts)
        # As in an episode: a result bears the id that was read, if the model wrote one.
        ids = [attempt.call_id for attempt in attempts] if len(attempts) == len(results) else [None] * len(results)
        answers = [tool_message(r["name"], r["content"], it) for r, it in zip(results, ids, strict=True)]
        counts.bridges += 1
        bridge = chat.bridge([chat.stop_ids[0]], answers, **given)
        _count(counts, f"bridge of {results}", [chat.stop_ids[0], *bridge], whole[end - 1 :])


def _own(chat: TemplateFormat, tokenizer: Any, messages: list[Message], schemas: list[Any], thinking: Any) -> list[int]:
    """Return the tokenizer's ids for the text of the model's own template."""
    shaped, tools = chat.shaped(messages, schemas)
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    printed = {"tokenize": False, "add_generation_prompt": True, **kwargs}
    text = tokenizer.apply_chat_template(shaped, tools=tools or None, **printed)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _count(counts: Tally, what: str, ours: Sequence[int], own: Sequence[int]) -> None:
    counts.tokens += len(own)
    if list(ours) != list(own):
        counts.drifted += sum(a != b for a, b in zip(ours, own, strict=False)) + abs(len(ours) - len(own))
        if len(counts.shown) < 3:
            counts.shown.append(f"{what}: {ours} instead of {own}"[:2000])


def _read(
    chat: TemplateFormat, turn: Message, said: Sequence[int], before: Sequence[int], counts: Tally
) -> tuple[CallAttempt, ...]:
    counts.tokens += len(said)
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]]
    parsed = chat.parse(said, before=before)
    read = [(attempt.name, attempt.arguments) for attempt in parsed.attempts if attempt.status is AttemptStatus.OK]
    counts.calls += len(made)
    same = [
        one[0] == other[0] and _plain(one[1]) == _plain(other[1] or {}) for one, other in zip(made, read, strict=False)
    ]
    counts.misread += max(len(made), len(parsed.attempts)) - sum(same)
    if not (all(same) and len(made) == len(parsed.attempts)) and len(counts.shown) < 3:
        counts.shown.append(f"{made} was read as {parsed.attempts}"[:2000])
    return parsed.attempts


def _plain(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Values as text: some families write them so, and the schema makes numbers of them."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return {key: unicodedata.normalize("NFC", _canonical(text)) for key, text in texts.items()}


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return text


def _text(draw: random.Random, *, empty: bool = True) -> str:
    n = draw.choice([0, 1, 1, 2, 3] if empty else [1, 2, 3])
    return draw.choice([" ", "\n", ""]).join(draw.choice(_TEXTS) for _ in range(n))


def _arguments(draw: random.Random, chat: TemplateFormat) -> dict[str, Any]:
    """Return arguments that the template can print so that it can be read: LFM2's escapes no quote, and Gemma 4's has no null."""
    arguments: dict[str, Any] = {}
    for key in draw.sample(["key", "count", "flags", "deep"], draw.randint(0, 4)):
        text = _text(draw)
        if chat.name == "lfm2":
            text = "".join(letter for letter in text if letter not in "'\"\\\n\r\t\u2028")
        deep = {"in": [text, {"a": 1}]}
        value = {"key": text, "count": draw.randint(-9, 10**6), "flags": [True, 1.5, text], "deep": deep}
        arguments[key] = value[key]
    return arguments


def _schema(name: str, text: str) -> dict[str, Any]:
    key = {"type": "string", "description": text}
    parameters = {"type": "object", "properties": {"key": key}, "required": ["key"]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
