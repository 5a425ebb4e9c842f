"""Tokens of the Hermes formats against the tokenizers' own calls, over random conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.real_tokenizers import NotAtHand, real_tokenizer
from toolgrpo.calls import AttemptStatus
from toolgrpo.chat import resolve_format
from toolgrpo.chat.format import TemplateFormat

pytestmark = pytest.mark.property

SHARED = Path(__file__).parents[3] / "shared" / "tokenizers"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CONTROL = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "</tool_response>", "<think>", "</think>"]

benign = st.text(
    st.characters(exclude_categories=["Cs", "Co"], exclude_characters="<|>"), min_size=1, max_size=60
).filter(lambda text: text.strip() == text)
hostile = st.lists(st.one_of(benign, st.sampled_from(CONTROL)), min_size=1, max_size=6).map("".join)


@pytest.fixture(scope="module", params=["qwen3", "qwen2_5"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, TemplateFormat]:
    try:
        tokenizer = real_tokenizer(f"real-{request.param}", SHARED)
    except NotAtHand as missing:
        pytest.skip(str(missing))
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    return tokenizer, chat


def conversation(texts: list[str]) -> list[dict[str, str]]:
    roles = ["system", "user"] if len(texts) > 1 else ["user"]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(benign, min_size=1, max_size=2), with_tools=st.booleans())
def test_prompts_are_the_tokenizers_own_for_harmless_text(
    loaded: tuple[Any, TemplateFormat], texts: list[str], with_tools: bool
) -> None:
    tokenizer, chat = loaded
    messages, tools = conversation(texts), [SCHEMA] if with_tools else None
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert chat.prompt(messages, tools or []) == expected


@settings(max_examples=25, deadline=None)
@given(results=st.lists(benign, min_size=1, max_size=3))
def test_the_bridge_is_what_the_template_prints_after_the_turn(
    loaded: tuple[Any, TemplateFormat], results: list[str]
) -> None:
    tokenizer, chat = loaded
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}] * len(results)
    tool_messages = [{"role": "tool", "name": "add", "content": text} for text in results]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *tool_messages,
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    end = chat.stop_ids[0]
    position = [i for i, token in enumerate(whole) if token == end]
    # the assistant turn's end is the last one before the results' own
    bridge = chat.bridge([end], tool_messages)
    n_ends = bridge.count(end)
    assert whole[position[-n_ends - 1] + 1 :] == bridge


@settings(max_examples=25, deadline=None)
@given(text=hostile)
def test_no_text_becomes_a_control_token(loaded: tuple[Any, TemplateFormat], text: str) -> None:
    tokenizer, chat = loaded
    control = {chat.control[token] for token in CONTROL if token in chat.control}

    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if i in control]

    quiet = chat.prompt([{"role": "user", "content": "x"}], [])
    assert controls(chat.prompt([{"role": "user", "content": text}], [])) == controls(quiet)
    message = {"role": "tool", "name": "add", "content": text}
    loud = chat.bridge(list(chat.stop_ids), [message])
    assert controls(loud) == controls(chat.bridge(list(chat.stop_ids), [{**message, "content": "x"}]))
    assert text in tokenizer.decode(loud)


@settings(max_examples=25, deadline=None)
@given(a=st.integers(), text=benign)
def test_calls_are_read_back(loaded: tuple[Any, TemplateFormat], a: int, text: str) -> None:
    tokenizer, chat = loaded
    call = json.dumps({"name": "add", "arguments": {"a": a, "text": text}}, ensure_ascii=False)
    ids = tokenizer(f"well\n<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    parsed = chat.parse(ids)
    assert parsed.closed and parsed.content == "well"
    (attempt,) = parsed.attempts
    assert attempt.status is AttemptStatus.OK and attempt.arguments == {"a": a, "text": text}


@settings(max_examples=25, deadline=None)
@given(text=hostile, cut=st.integers(0, 40))
def test_parse_never_raises(loaded: tuple[Any, TemplateFormat], text: str, cut: int) -> None:
    tokenizer, chat = loaded
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for part in (ids, ids[:cut], ids[cut:]):
        parsed = chat.parse(part)
        assert len(parsed.attempts) <= part.count(tokenizer.convert_tokens_to_ids("<tool_call>"))


def test_a_turn_that_was_cut_is_closed_as_context(loaded: tuple[Any, TemplateFormat]) -> None:
    _, chat = loaded
    message = [{"role": "tool", "content": "3"}]
    assert chat.bridge([5, 6], message) == [chat.stop_ids[0], *chat.bridge([5, chat.stop_ids[0]], message)]


def test_half_a_surrogate_pair_is_replaced(loaded: tuple[Any, TemplateFormat]) -> None:
    _, chat = loaded
    assert chat.bridge(list(chat.stop_ids), [{"role": "tool", "content": "a\ud800b"}])
