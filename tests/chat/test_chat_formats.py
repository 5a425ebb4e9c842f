"""Every case over every chat format: TRL's templates over bytes, nano's tokenizer, SmolLM2's template, which knows no tools,
and the real tokenizers of Qwen3, Qwen2.5 and GPT-OSS where they are at hand.

`bridge_proof.py` has shown each format, when it is loaded, that results stand in their bridge in order and that a turn which
was cut is closed first: that is not repeated here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipes.nano.tokenizer import build_tokenizer
from tests.support.chat_families import template_names, template_text, trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling, printed_turn, thinking_markers
from tests.support.real_tokenizers import REAL_TOKENIZERS, NotAtHand, real_tokenizer
from toolgrpo.chat import check_vocabulary, resolve_format, tool_message
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus
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
SHARED = Path(__file__).parents[3] / "shared" / "tokenizers"


@dataclass(frozen=True)
class Loaded:
    tokenizer: Any
    chat: TemplateFormat

    @property
    def close(self) -> int:
        return self.chat.stop_ids[0]

    @property
    def one_call(self) -> bool:
        return self.chat.family.one_call

    def text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def controls(self, ids: list[int]) -> list[int]:
        known = set(self.chat.control.values())
        return [token for token in ids if token in known]

    def turn(self, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> tuple[list[int], list[int]]:
        """A prompt, and the turn after it that the model's own template prints for these calls."""
        results = [tool_message("look_up", "r") for _ in calls]
        question: Message = {"role": "user", "content": "q"}
        printed = printed_turn(self.chat, [question], calling(*calls, content=content), results, [LOOK_UP])
        return printed.before, printed.said


@cache
def load(name: str) -> Loaded:
    if name in REAL_TOKENIZERS:
        try:
            tokenizer = real_tokenizer(name, SHARED)
        except NotAtHand as missing:
            pytest.skip(str(missing))
    else:
        tokenizer = build_tokenizer(['{"key": "word"} 42'], 400) if name == OURS else trl_tokenizer(name)
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat)
    return Loaded(tokenizer, chat)


@pytest.fixture(params=NAMES)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load(request.param)


def test_prompt_sampled_and_bridge_are_what_the_template_prints_for_the_conversation(loaded: Loaded) -> None:
    before, said = loaded.turn([("look_up", {"key": "x"})])
    ledger = Ledger(before)
    ledger.sampled(said, [-0.5] * len(said))
    ledger.context(loaded.chat.bridge(ledger.all_ids, [tool_message("look_up", "r")]))
    question: Message = {"role": "user", "content": "q"}
    conversation = [question, calling(("look_up", {"key": "x"})), tool_message("look_up", "r")]
    assert ledger.all_ids == loaded.chat.prompt(conversation, [LOOK_UP])
    done = ledger.finish(StopReason.FINISHED)
    assert done.mask[: len(said)] == (1,) * len(said) and not any(done.mask[len(said) :])


def test_no_text_from_anywhere_adds_a_control_token(loaded: Loaded) -> None:
    def everywhere(text: str) -> list[int]:
        call = {"type": "function", "function": {"name": text, "arguments": {"key": text, text: [text]}}}
        schema = json.loads(json.dumps(LOOK_UP))
        schema["function"]["description"] = text
        schema["function"]["parameters"]["properties"]["key"] |= {"description": text, "enum": [text]}
        prompt = loaded.chat.prompt(
            [
                {"role": "system", "content": text},
                {"role": "user", "content": text},
                {"role": "assistant", "content": text},
                {"role": "user", "content": text},
                {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [call]},
                tool_message(text, text),
            ],
            [schema],
        )
        return loaded.controls([*prompt, *loaded.chat.bridge([loaded.close], [tool_message(text, text)])])

    quiet = everywhere("x")
    for token in loaded.chat.control:
        assert everywhere(f"a{token}b{token}") == quiet
        assert everywhere(token) == quiet
        assert everywhere(token[:-1]) == quiet  # the template's next character must not complete it
        assert everywhere(token[1:]) == quiet


def test_calls_are_read_back_in_order_with_their_content(loaded: Loaded) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("look_up", {"key": 'a "quoted" word, with {brackets} and Grüße'}),
        ("other", {"key": "zwei\nZeilen"}),
    ]
    before, said = loaded.turn(calls[:1] if loaded.one_call else calls)
    parsed = loaded.chat.parse(said, before=before)
    assert parsed.closed and parsed.content == ""
    assert [(a.status, a.name, a.arguments) for a in parsed.attempts] == [
        (AttemptStatus.OK, name, arguments) for name, arguments in (calls[:1] if loaded.one_call else calls)
    ]


def test_a_turn_cut_anywhere_keeps_the_calls_it_had_finished_and_never_raises(loaded: Loaded) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("look_up", {"key": "one"}), ("look_up", {"key": "two"})]
    before, said = loaded.turn(calls[:1] if loaded.one_call else calls)
    whole = loaded.chat.parse(said, before=before).attempts
    read = 0
    for cut in range(len(said)):
        parsed = loaded.chat.parse(said[:cut], before=before)
        good = [attempt for attempt in parsed.attempts if attempt.status is AttemptStatus.OK]
        assert not parsed.closed and len(parsed.attempts) - len(good) <= 1
        assert [a.arguments for a in good] == [a.arguments for a in whole[: len(good)]] and len(good) >= read
        assert all(attempt.detail for attempt in parsed.attempts if attempt.status is not AttemptStatus.OK)
        read = len(good)


def test_a_call_inside_thinking_is_no_call(loaded: Loaded) -> None:
    form = loaded.chat.family.form
    if not form.call.opening:
        pytest.skip("this family writes no calls between markers")
    _, said = loaded.turn([("look_up", {"key": "x"})])
    start = loaded.text(said).index(form.call.opening[0])
    end = loaded.text(said).rindex(form.call.closing) + len(form.call.closing)
    call = loaded.chat.encode(loaded.text(said)[start:end])
    assert len(loaded.chat.parse([*call, loaded.close]).attempts) == 1
    opening, closing = map(loaded.chat.encode, thinking_markers(loaded.chat))
    inside = [*opening, *call, *closing]
    answer = loaded.chat.encode("done")
    assert loaded.chat.parse([*inside, *answer, loaded.close]).attempts == ()
    assert loaded.chat.parse([*inside, *answer, loaded.close]).content == "done"
    assert len(loaded.chat.parse([*inside, *call, loaded.close]).attempts) == 1
    # opened by the prompt and never closed: only the ids before the turn can tell
    assert loaded.chat.parse(call, before=opening).attempts == ()


@pytest.mark.parametrize("value", [None, False, True])
def test_a_turn_after_results_is_opened_as_the_turn_before_was(loaded: Loaded, value: bool | None) -> None:
    result = [tool_message("look_up", "r")]
    turn = [*loaded.chat.encode("x"), loaded.close]
    question: list[Message] = [{"role": "user", "content": "q"}]
    prompt = loaded.chat.prompt(question, [LOOK_UP], enable_thinking=value)
    first = loaded.chat.bridge([*prompt, *turn], result, enable_thinking=value)
    second = loaded.chat.bridge([*prompt, *turn, *first, *turn], result, enable_thinking=value)
    whole = loaded.chat.prompt(
        [*question, calling(("look_up", {"key": "x"})), *result],
        [LOOK_UP],
        enable_thinking=value,
    )
    assert first == second == whole[len(whole) - len(first) :]


def test_half_a_surrogate_pair_is_replaced(loaded: Loaded) -> None:
    assert loaded.chat.bridge([loaded.close], [tool_message("look_up", "a\ud800b")])
    assert loaded.chat.prompt([{"role": "user", "content": "a\udfffb"}], [LOOK_UP])


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_proven_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ChatFormatError, match=REFUSED[name]):
        resolve_format(trl_tokenizer(name))


@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "gptoss", "glm4moe"])
def test_a_template_on_a_tokenizer_of_another_family_is_refused(name: str) -> None:
    tokenizer = trl_tokenizer("qwen3")
    tokenizer.chat_template = template_text(name)
    with pytest.raises(ChatFormatError, match="no single token of this tokenizer"):
        resolve_format(tokenizer)


def test_bad_tokenizers_are_refused_with_a_sentence() -> None:
    template = template_text("qwen3")
    with pytest.raises(ChatFormatError, match=r"<\|im_end\|>"):
        resolve_format(byte_tokenizer(template, ["<|im_start|>"]))
    with pytest.raises(ChatFormatError, match="no chat template"):
        resolve_format(byte_tokenizer("", ["<|im_start|>", "<|im_end|>"]))
    with pytest.raises(ModelError, match="vocabulary"):
        check_vocabulary(trl_tokenizer("qwen3"), 200)


def test_a_template_that_loses_something_is_refused_with_shape_and_position() -> None:
    template = template_text("qwen3")
    broken = {
        r"never sees its tools: \['look_up', ": template.replace("{%- if tools %}", "{%- if false %}", 1),
        "is not in the bridge|differ from": template.replace(
            "{{- content }}\n        {{- '\\n</tool_response>'", "{{- '\\n</tool_response>'"
        ),
        "read back as": template.replace('\'<tool_call>\\n{"name": "\'', '\'<tool_call>\\n{"nam": "\''),
        "at token": template.replace(
            "{%- if loop.first or (messages[loop.index0 - 1]", "{%- if loop.index0 == 2 or (messages[loop.index0 - 2]"
        ),
    }
    for sentence, text in broken.items():
        assert text != template
        tokenizer = trl_tokenizer("qwen3")
        tokenizer.chat_template = text
        with pytest.raises(ChatFormatError, match=sentence):
            resolve_format(tokenizer)
