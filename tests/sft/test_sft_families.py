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


def answers(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"id{number}", "content": text} for number, text in enumerate(texts)]


@pytest.mark.parametrize("name", ["llama3_1", "gptoss", "qwen3", "glm4moe"])
def test_every_call_of_a_turn_is_learnt_and_its_own_result_is_shown_behind_it(name: str) -> None:
    tokenizer, chat = supported(name)
    said = calling(("look_up", {"key": "x"}), ("find", {"key": "y"}))
    said["tool_calls"] = [{**call, "id": f"id{place}"} for place, call in enumerate(said["tool_calls"])]
    first, second = answers("of x", "of y")
    messages = [{"role": "user", "content": "?"}, said, second, first, {"role": "assistant", "content": "Both."}]
    example = ConversationEncoder(tokenizer, chat)(messages, [LOOK_UP])
    turns = learnt(chat, example.ids, example.mask)
    calls = [(one.name, one.arguments) for turn in turns for one in turn.attempts]
    assert calls == [("look_up", {"key": "x"}), ("find", {"key": "y"})] and turns[-1].content.strip() == "Both."
    text = tokenizer.decode(example.ids)
    assert "unknown" not in text, "a result has the name of its call"
    if chat.family.one_call:
        assert text.index("of x") < text.index('"y"') < text.index("of y"), "each result behind its own call"


def test_an_answer_that_only_looks_like_a_call_is_taught_as_it_stands() -> None:
    tokenizer, chat = supported("llama3_1")
    said = '{"name": "Ann", "age": 30}'
    example = ConversationEncoder(tokenizer, chat)(
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": said}]
    )
    learnt_ids = [token for token, bit in zip(example.ids, example.mask, strict=True) if bit]
    assert tokenizer.decode(learnt_ids[:-1]) == said


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "llama3"])
def test_thinking_in_a_text_is_taught_where_the_template_prints_none(name: str) -> None:
    tokenizer, chat = supported(name)
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 12."}
    example = ConversationEncoder(tokenizer, chat)([CONVERSATION[0], said])
    ids = [token for token, bit in zip(example.ids, example.mask, strict=True) if bit]
    assert tokenizer.decode(ids[:-1]) == said["content"]


def test_thinking_in_the_text_of_a_turn_with_calls_is_thinking() -> None:
    tokenizer, chat = supported("qwen3")
    said = calling(("look_up", {"key": "x"}), content="<think>\nhm\n</think>")
    example = ConversationEncoder(tokenizer, chat)([CONVERSATION[0], said], [LOOK_UP])
    (turn,) = learnt(chat, example.ids, example.mask)
    assert (turn.reasoning or "").strip() == "hm" and len(turn.attempts) == 1
    assert tokenizer.convert_tokens_to_ids("</think>") in example.ids


def test_an_answer_ends_as_the_template_ends_one_that_a_user_replies_to() -> None:
    tokenizer, chat = supported("glm4moe")
    example = ConversationEncoder(tokenizer, chat)(CONVERSATION, [LOOK_UP])
    ends = [
        tokenizer.convert_ids_to_tokens(token)
        for token, bit, behind in zip(example.ids, example.mask, [*example.mask[1:], 0], strict=True)
        if bit and not behind
    ]
    assert ends == ["<|observation|>", "<|user|>", "<|observation|>", "<|user|>"]


def test_the_words_of_a_user_are_shown_whole() -> None:
    tokenizer, chat = supported("qwen3")
    asks = "Now write the STUB class"
    messages = [*CONVERSATION[:1], THOUGHT, {"role": "user", "content": asks}, THOUGHT]
    example = ConversationEncoder(tokenizer, chat)(messages)
    assert f"<|im_start|>user\n{asks}<|im_end|>" in tokenizer.decode(example.ids)


def test_words_about_calls_are_taught_as_they_stand_and_a_broken_call_beside_a_good_one_is_an_error() -> None:
    tokenizer, chat = supported("qwen3")
    asked, good = CONVERSATION[0], '<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}\n</tool_call>'
    words = "Put it between <tool_call> and </tool_call>."
    example = ConversationEncoder(tokenizer, chat)(
        [asked, {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{words}"}]
    )
    ids = [token for token, bit in zip(example.ids, example.mask, strict=True) if bit]
    assert words in tokenizer.decode(ids) and tokenizer.convert_tokens_to_ids("<tool_call>") not in ids
    assert tokenizer.convert_tokens_to_ids("</think>") in ids, "thinking is thinking"
    with pytest.raises(ChatFormatError, match="cannot be read"):
        ConversationEncoder(tokenizer, chat)(
            [asked, {"role": "assistant", "content": f"{good}\n<tool_call>\n{{broken\n</tool_call>"}]
        )
