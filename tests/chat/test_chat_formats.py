"""Every case over every chat format: TRL's templates over bytes, nano's tokenizer, SmolLM2's template, which knows no tools,
and the real tokenizers of Qwen3, Qwen2.5 and GPT-OSS where they are at hand.

`bridge_proof.py` has shown each format, when it is loaded, that results stand in their bridge in order and that a turn which
was cut is closed first: that is not repeated here."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from recipes.nano.tokenizer import build_tokenizer
from tests.support.chat_families import template_names, template_text, trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling, check_read_back, printed_turn, thinking_markers
from tests.support.real_tokenizers import REAL_TOKENIZERS, format_of
from toolgrpo.chat import check_vocabulary, resolve_format, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import Message, StopReason
from toolgrpo.errors import ChatFormatError, ModelError
from toolgrpo.testing import byte_tokenizer

pytestmark = pytest.mark.contract

# TRL has no response template for any of these: see test_trl_has_no_response_template_for_what_is_refused
REFUSED = {
    "idefics3": "no family",
    "llava_next": "no family",
    "smolvlm": "does not print a tool call",  # contents are lists of parts, never texts
}
OURS = "nano"  # the project's own tokenizer: words, single digits, bytes
NAMES = [*(name for name in template_names() if name not in REFUSED), *REAL_TOKENIZERS, OURS]
QUESTION: Message = {"role": "user", "content": "q"}
CALL = ("look_up", {"key": "x"})
RESULT = tool_message("look_up", "r")


def turn_of(chat: TemplateFormat, calls: list[tuple[str, dict[str, Any]]]) -> tuple[list[int], list[int]]:
    """A prompt, and the turn after it that the model's own template prints for these calls."""
    printed = printed_turn(chat, [QUESTION], calling(*calls), [RESULT] * len(calls), [LOOK_UP])
    return printed.before, printed.said


@cache
def ours() -> TemplateFormat:
    chat = resolve_format(build_tokenizer(['{"key": "word"} 42'], 400))
    assert isinstance(chat, TemplateFormat)
    return chat


@pytest.fixture(params=NAMES)
def chat(request: pytest.FixtureRequest) -> TemplateFormat:
    return ours() if request.param == OURS else format_of(request.param)[1]


def test_prompt_sampled_and_bridge_are_what_the_template_prints_for_the_conversation(chat: TemplateFormat) -> None:
    before, said = turn_of(chat, [CALL])
    ledger = Ledger(before)
    ledger.sampled(said, [-0.5] * len(said))
    ledger.context(chat.bridge(ledger.all_ids, [RESULT]))
    assert ledger.all_ids == chat.prompt([QUESTION, calling(CALL), RESULT], [LOOK_UP])
    done = ledger.finish(StopReason.FINISHED)
    assert done.mask[: len(said)] == (1,) * len(said) and not any(done.mask[len(said) :])


def test_no_text_from_anywhere_adds_a_control_token(chat: TemplateFormat) -> None:
    def everywhere(text: str) -> list[int]:
        call = {"type": "function", "function": {"name": text, "arguments": {"key": text, text: [text]}}}
        schema = json.loads(json.dumps(LOOK_UP))
        schema["function"]["description"] = text
        schema["function"]["parameters"]["properties"]["key"] |= {"description": text, "enum": [text]}
        spoken: list[Message] = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
        turn = {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [call]}
        prompt = chat.prompt([*spoken, turn, tool_message(text, text)], [schema])
        bridge = chat.bridge([chat.stop_ids[0]], [tool_message(text, text)])
        return [token for token in (*prompt, *bridge) if token in control]

    control = set(chat.control.values())
    quiet = everywhere("x")
    for token in chat.control:
        # the template's next character must not complete a part of it
        for text in (f"a{token}b{token}", token, token[:-1], token[1:]):
            assert everywhere(text) == quiet


def test_calls_are_read_back_in_order_and_a_turn_cut_anywhere_keeps_those_it_had_finished(chat: TemplateFormat) -> None:
    check_read_back(
        chat, [("look_up", {"key": 'a "quoted" word, with {brackets} and Grüße'}), ("other", {"key": "zwei\nZeilen"})]
    )


def test_a_call_inside_thinking_is_no_call(chat: TemplateFormat) -> None:
    form = chat.family.form
    if not form.call.opening:
        pytest.skip("this family writes no calls between markers")
    text = chat._decode(turn_of(chat, [CALL])[1])
    end = text.rindex(form.call.closing) + len(form.call.closing)
    call = chat.encode(text[text.index(form.call.opening[0]) : end])
    assert len(chat.parse([*call, chat.stop_ids[0]]).attempts) == 1
    opening, closing = map(chat.encode, thinking_markers(chat))
    inside = [*opening, *call, *closing]
    answered = chat.parse([*inside, *chat.encode("done"), chat.stop_ids[0]])
    assert answered.attempts == () and answered.content == "done"
    assert len(chat.parse([*inside, *call, chat.stop_ids[0]]).attempts) == 1
    # opened by the prompt and never closed: only the ids before the turn can tell
    assert chat.parse(call, before=opening).attempts == ()


@pytest.mark.parametrize("value", [None, False, True])
def test_a_turn_after_results_is_opened_as_the_turn_before_was(chat: TemplateFormat, value: bool | None) -> None:
    turn = [*chat.encode("x"), chat.stop_ids[0]]
    prompt = chat.prompt([QUESTION], [LOOK_UP], enable_thinking=value)
    first = chat.bridge([*prompt, *turn], [RESULT], enable_thinking=value)
    second = chat.bridge([*prompt, *turn, *first, *turn], [RESULT], enable_thinking=value)
    whole = chat.prompt([QUESTION, calling(CALL), RESULT], [LOOK_UP], enable_thinking=value)
    assert first == second == whole[len(whole) - len(first) :]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_what_a_developer_says_is_shown(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    messages = [{"role": "developer", "content": "Answer in euros."}, {"role": "user", "content": "q"}]
    assert "Answer in euros." in tokenizer.decode(resolve_format(tokenizer).prompt(messages, []))


def test_half_a_surrogate_pair_is_replaced(chat: TemplateFormat) -> None:
    assert chat.bridge([chat.stop_ids[0]], [tool_message("look_up", "a\ud800b")])
    assert chat.prompt([{"role": "user", "content": "a\udfffb"}], [LOOK_UP])


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_proven_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ChatFormatError, match=REFUSED[name]):
        resolve_format(trl_tokenizer(name))


@pytest.mark.parametrize("name", ["llama3_1", "gptoss"])
def test_a_template_on_a_tokenizer_of_another_family_is_refused(name: str) -> None:
    tokenizer = trl_tokenizer("qwen3")
    tokenizer.chat_template = template_text(name)
    with pytest.raises(ChatFormatError, match="not a single token of this tokenizer"):
        resolve_format(tokenizer)


def test_bad_tokenizers_are_refused_with_a_sentence() -> None:
    template = template_text("qwen3")
    for text, tokens, says in ((template, ["<|im_start|>"], r"<\|im_end\|>"), ("", [], "no chat template")):
        with pytest.raises(ChatFormatError, match=says):
            resolve_format(byte_tokenizer(text, tokens))
    with pytest.raises(ModelError, match="vocabulary"):
        check_vocabulary(trl_tokenizer("qwen3"), 200)


def test_a_template_that_loses_something_is_refused_with_shape_and_position() -> None:
    template = template_text("qwen3")
    broken = {
        r"never sees its tools: no \['look_up', ": template.replace("{%- if tools %}", "{%- if false %}", 1),
        "is not in the bridge|differ from": template.replace("{{- content }}\n        {{- '\\n</t", "{{- '\\n</t"),
        "read back as": template.replace('\'<tool_call>\\n{"name": "\'', '\'<tool_call>\\n{"nam": "\''),
        "at token": template.replace(
            "loop.first or (messages[loop.index0 - 1]", "loop.index0 == 2 or (messages[loop.index0 - 2]"
        ),
    }
    for sentence, text in broken.items():
        assert text != template
        tokenizer = trl_tokenizer("qwen3")
        tokenizer.chat_template = text
        with pytest.raises(ChatFormatError, match=sentence):
            resolve_format(tokenizer)


def test_the_end_of_text_of_the_tokenizer_ends_a_turn_too() -> None:
    """Base models come with their own, and chat models say it now and then."""
    tokenizer = trl_tokenizer("qwen3")
    tokenizer.add_special_tokens({"eos_token": "<|the_end|>"})
    chat = resolve_format(tokenizer)
    assert chat.stop_ids[-1] == tokenizer.eos_token_id != chat.stop_ids[0]
    turn = chat.parse(tokenizer.encode("It is 12.<|the_end|>", add_special_tokens=False))
    assert turn.closed and turn.content == "It is 12."
