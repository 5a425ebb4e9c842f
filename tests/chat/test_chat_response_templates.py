"""Response templates: formats made of one alone, and which one a known family is read by."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template
from trl.chat_template_utils import add_response_schema

from tests.support.chat_families import template_names, template_text, trl_tokenizer
from tests.support.chat_samples import check_read_back
from toolgrpo.chat import families, resolve_format
from toolgrpo.chat.encoding import TextGuard
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.chat.response_template import described_format, response_template_of
from toolgrpo.chat.turn_reader import TurnReader
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.errors import ChatFormatError
from toolgrpo.testing import byte_tokenizer

pytestmark = pytest.mark.contract

OK, INVALID, UNCLOSED = AttemptStatus.OK, AttemptStatus.INVALID_JSON, AttemptStatus.UNCLOSED

# What a response template cannot describe: which token ends a turn, where it is none that also ends an answer.
NOT_DESCRIBED = ("glm4moe", "gptoss")
WITHOUT_CALLS = "deepseek_r1_distill"


# Known families that TRL has a response template for, and the new model that has only its own.
READ = [
    name
    for name in template_names()
    if name not in (WITHOUT_CALLS, *NOT_DESCRIBED) and response_template_of(trl_tokenizer(name)) is not None
]


@cache
def described(name: str) -> TemplateFormat:
    chat = described_format(trl_tokenizer(name))
    assert chat is not None
    return chat


@pytest.mark.parametrize("name", READ)
def test_what_the_template_prints_is_read_with_every_call_kept(name: str) -> None:
    check_read_back(described(name), [("look_up", {"key": 'a "b" <c>, {d}'}), ("other", {"key": "two\nlines"})])


def test_a_turn_of_every_shape_is_taken_apart() -> None:
    chat = described("muse_glimmer")
    text = (
        ' to=self<|message|>hm <atem:invoke name="f"></atem:invoke><|eom|><|start|>assistant'
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a"> 1\n</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=user<|message|>done<|eot|>"
    )
    parsed = chat.parse(chat.encode(text))
    assert (parsed.reasoning, parsed.content) == ('hm <atem:invoke name="f"></atem:invoke>', "done")
    assert [(a.status, a.name, a.arguments) for a in parsed.attempts] == [(OK, "f", {"a": " 1\n"})]
    assert chat.parse(chat.encode("no header at all<|eot|>")).content == "no header at all"


def test_a_marker_in_letters_is_text() -> None:
    chat = described("qwen3")
    text = 'Write <tool_call>{"name": "f"}</tool_call>, or <think>, or <|im_end|>.'
    guard = TextGuard(chat.control)
    parsed = chat.parse(chat.encode(guard.text(text)))
    assert (parsed.content, parsed.attempts, parsed.reasoning) == (text, (), None)
    inside = '{"name": "f", "arguments": {"a<think>": "</tool_call>"}}'
    (attempt,) = chat.parse(chat.encode(f"<tool_call>{guard.text(inside)}</tool_call>")).attempts
    assert (attempt.arguments, attempt.raw) == ({"a<think>": "</tool_call>"}, inside)


GOOD = '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("qwen3", f"<tool_call>{GOOD}</tool_call>\n<tool_call>{{</tool_call>a", [OK, INVALID]),
        ("qwen3", f"<tool_call>{GOOD}\n<tool_call>{GOOD}</tool_call><tool_call>", [UNCLOSED, OK, UNCLOSED]),
        ("qwen3", f"<tool_call>{'[' * 9000}</tool_call>", [INVALID]),
        ("qwen3_5_think", f"<tool_call>{GOOD}</tool_call>", [INVALID]),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>1</function></tool_call>", [INVALID]),
        ("qwen3_5_think", "<tool_call><function=f><parameter=a>1</parameter>", [UNCLOSED]),
        ("muse_glimmer", ' to=f<|message|><atem:invoke name="f">hm</atem:invoke>', [INVALID]),
        ("muse_glimmer", ' to=f<|message|><atem:invoke name="f"><atem:parameter name="a">1', [UNCLOSED]),
    ],
)
def test_malformed_calls_are_attempts_in_order(name: str, said: str, expected: list[AttemptStatus]) -> None:
    chat = described(name)
    parsed = chat.parse(chat.encode(said))
    assert [attempt.status for attempt in parsed.attempts] == expected
    for attempt in parsed.attempts:
        assert attempt.raw in said and len(attempt.detail) < 600, "a model reads it"
        assert (attempt.arguments is None) == bool(attempt.detail) == (attempt.status is not OK)


def test_what_is_wrong_is_said_with_the_form_the_template_prints() -> None:
    chat = described("qwen3")
    (attempt,) = chat.parse(chat.encode("<tool_call>{</tool_call>")).attempts
    assert "Expecting property name" in attempt.detail and '{"name": "NAME", "arguments": ' in attempt.detail
    chat = described("qwen3_5_think")
    (cut,) = chat.parse(chat.encode("<tool_call>\n<function=f>")).attempts
    assert "</tool_call>" in cut.detail and cut.name == "f"


def test_a_pattern_that_takes_too_long_is_stopped() -> None:
    """TRL's pattern for a parameter goes over spaces three times in each other: cubic."""
    chat = described("qwen3_5_think")
    call = f"<tool_call><function=f><parameter=a>{' ' * 20_000}</tool_call>"
    first, second = chat.parse(chat.encode(call + call)).attempts
    assert first.status is second.status is INVALID and first.name == "f"
    assert "timed out" in first.detail and "too long" in second.detail


def test_a_response_template_that_cannot_be_used_is_refused_with_a_sentence() -> None:
    spec = trl_tokenizer("muse_glimmer").response_template
    fields = spec["fields"]
    without = {key: value for key, value in fields.items() if key != "tool_calls"}
    lost = {**fields["tool_calls"]["transform"]["function"], "arguments": {}}

    def with_calls(**more: Any) -> dict[str, Any]:
        return {**spec, "fields": {**fields, "tool_calls": {**fields["tool_calls"], **more}}}

    def with_end(end: str) -> dict[str, Any]:
        return {**spec, "fields": {**fields, "content": {**fields["content"], "close": end}}}

    for sentence, described_as, eos in (
        ("its form of calls is not read yet", None, "<|eot|>"),
        ("is not valid: response_template must define", {"fields": fields}, "<|eot|>"),
        ("no family that toolgrpo supports: its form of calls", {**spec, "fields": without}, "<|eot|>"),
        ("does not describe the calls", with_calls(open_pattern="<call (?P<name>.*?)>"), "<|eot|>"),
        ("prints none of them after a call", with_end("<|end_of_turn|>"), "<|end_of_text|>"),
        ("read back as", with_calls(transform={"type": "function", "function": lost}), "<|eot|>"),
    ):
        tokenizer = trl_tokenizer("muse_glimmer")
        tokenizer.response_template, tokenizer.eos_token = described_as, eos
        with pytest.raises(ChatFormatError, match=sentence):
            resolve_format(tokenizer)


def test_a_tokenizers_response_template_comes_before_a_family_that_knows_no_tools() -> None:
    """A ChatML template with calls of its own: without a response template it would get Hermes' words as text."""
    template, tokens = template_text("qwen3").replace("tool_call>", "action>"), ["<action>", "</action>"]
    tokenizer = byte_tokenizer(template, tokens, special=["<|im_start|>", "<|im_end|>"], eos="<|im_end|>")
    assert resolve_format(tokenizer).name == "chatml"
    fields = add_response_schema(trl_tokenizer("qwen3")).response_template["fields"]
    calls = {**fields["tool_calls"], "open": "<action>", "close_pattern": r"</action>\s*"}
    spec = {"start_anchor": "<|im_start|>assistant\n", "fields": {**fields, "tool_calls": calls}}
    tokenizer.response_template = spec
    chat = resolve_format(tokenizer)
    (attempt,) = chat.parse(chat.encode(f"<action>{GOOD}</action><|im_end|>")).attempts  # type: ignore[attr-defined]
    assert (chat.name, attempt.status) == ("response-template", OK)
    tokenizer.response_template = {**spec, "fields": fields}  # of calls that the template does not print
    assert resolve_format(tokenizer).name == "chatml"


@pytest.mark.parametrize("name", NOT_DESCRIBED)
def test_what_a_response_template_leaves_out_is_refused(name: str) -> None:
    with pytest.raises(ChatFormatError, match="prints none of them after a call"):
        described_format(trl_tokenizer(name))
    assert described_format(trl_tokenizer(WITHOUT_CALLS)) is response_template_of(trl_tokenizer("cohere2")) is None


def resolved(tokenizer: Any) -> tuple[TemplateFormat, TurnReader]:
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat) and isinstance(chat.reader, TurnReader)
    return chat, chat.reader


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_vl"])
def test_where_trls_template_reads_as_well_it_is_taken_as_it_is(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    (chat, reader), theirs = resolved(tokenizer), response_template_of(tokenizer)
    assert theirs is not None and theirs == add_response_schema(trl_tokenizer(name)).response_template
    assert getattr(tokenizer, "response_template", None) is None  # it was set on a copy
    assert chat.family.form is families.HERMES
    assert reader.call.field == load_response_template(theirs).fields["tool_calls"]
    assert "<|im_end|>" in reader.markers, "only TRL's template speaks of it, ours does not"


def test_a_tokenizers_own_template_counts_in_a_known_family_unless_it_does_not_hold() -> None:
    spec = response_template_of(trl_tokenizer("qwen3"))
    assert spec is not None
    calls = {**spec["fields"]["tool_calls"], "open": "<call>"}
    wrong = {**spec, "fields": {**spec["fields"], "tool_calls": calls}}
    for own, held in ((spec, True), (wrong, False), ({}, False), (None, False)):
        tokenizer = trl_tokenizer("qwen3")
        tokenizer.chat_template += "{# changed #}"
        assert response_template_of(tokenizer) is None, "TRL knows it no more, to the letter"
        tokenizer.response_template = own
        chat, reader = resolved(tokenizer)
        assert chat.name == "qwen3" and ("<|im_end|>" in reader.markers) == held
        (attempt,) = chat.parse(chat.encode(f"<tool_call>{GOOD}</tool_call>")).attempts
        assert (attempt.status, attempt.name, attempt.arguments) == (OK, "f", {})
