"""Every family is taught the words in which its calls are read later, whether its template prints calls or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_families import template_names, trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling
from toolgrpo.chat import resolve_format
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.errors import ChatFormatError
from toolgrpo.sft.encoder import ConversationEncoder

pytestmark = pytest.mark.contract

THOUGHT = {"role": "assistant", "content": "It is 13.", "reasoning_content": "fine"}
CONVERSATION = [
    {"role": "user", "content": "What is x?"},
    calling(("look_up", {"key": "x"})),
    {"role": "tool", "name": "look_up", "content": "12"},
    {"role": "assistant", "content": "It is 12."},
    {"role": "user", "content": "And y?"},
    calling(("look_up", {"key": "y"}), content="Let me see."),
    {"role": "tool", "name": "look_up", "content": "13"},
    THOUGHT,
]


def supported(name: str) -> tuple[Any, Any]:
    tokenizer = trl_tokenizer(name)
    try:
        return tokenizer, resolve_format(tokenizer)
    except ChatFormatError as refused:
        pytest.skip(f"toolgrpo does not train this family: {str(refused)[:80]}")


def learnt(chat: Any, ids: tuple[int, ...], mask: tuple[int, ...]) -> list[ParsedTurn]:
    """The masked stretches, read as sampled turns are."""
    turns = []
    start = 0
    while 1 in mask[start:]:
        start = mask.index(1, start)
        end = mask.index(0, start) if 0 in mask[start:] else len(mask)
        turns.append(chat.parse(ids[start:end], before=ids[:start]))
        start = end
    return turns


@pytest.mark.parametrize("name", template_names())
def test_what_is_taught_is_read_as_it_was_meant(name: str) -> None:
    tokenizer, chat = supported(name)
    example = ConversationEncoder(tokenizer, chat)(CONVERSATION, [LOOK_UP])
    first, answer, second, thought = learnt(chat, example.ids, example.mask)
    for turn, key in ((first, "x"), (second, "y")):
        assert [(a.status, a.name, a.arguments) for a in turn.attempts] == [(AttemptStatus.OK, "look_up", {"key": key})]
    assert (answer.content.strip(), answer.attempts) == ("It is 12.", ())
    assert (thought.content.strip(), thought.attempts) == ("It is 13.", ())
    assert all(turn.closed for turn in (first, answer, second, thought))


@pytest.mark.parametrize("name", template_names())
def test_the_tokens_are_those_of_the_ledger(name: str) -> None:
    """Prompt, turn, bridge, turn: what an episode of reinforcement learning would hold."""
    tokenizer, chat = supported(name)
    example = ConversationEncoder(tokenizer, chat)(CONVERSATION[:4], [LOOK_UP])
    start = example.mask.index(1)
    end = example.mask.index(0, start)
    thinking = next(
        flag
        for flag in (None, True, False)
        if chat.prompt(CONVERSATION[:1], [LOOK_UP], enable_thinking=flag) == list(example.ids[:start])
    )
    bridge = chat.bridge(
        example.ids[:end],
        CONVERSATION[2:3],
        messages=CONVERSATION[:1],
        schemas=[LOOK_UP],
        enable_thinking=thinking,
    )
    assert list(example.ids[end : end + len(bridge)]) == bridge
    assert all(example.mask[end + len(bridge) :])


def test_calls_written_into_the_text_are_taught_as_tokens() -> None:
    """Data sets often hold the markers as text; in other people's messages they stay letters."""
    tokenizer, chat = supported("qwen3")
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}\n</tool_call>'
    written = [{"role": "user", "content": "<tool_call> x?"}, {"role": "assistant", "content": text}]
    example = ConversationEncoder(tokenizer, chat)(written, [LOOK_UP])
    (turn,) = learnt(chat, example.ids, example.mask)
    assert [attempt.arguments for attempt in turn.attempts] == [{"key": "x"}]
    assert (turn.reasoning or "").strip() == "hm"
    marker = tokenizer.convert_tokens_to_ids("<tool_call>")
    asked = example.ids[: example.mask.index(1)]
    schemas_alone = chat.prompt([{"role": "user", "content": "x?"}], [LOOK_UP])
    assert asked.count(marker) == schemas_alone.count(marker)
