"""Why most known families have a corrected response template, and that the others take TRL's as it is.

A lock: each case of `WORSE` is a turn that transformers' parser or TRL's response template reads worse than ours does. When
one of them fails because they read it well, that correction may have become needless: see docs/chat_formats.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from tests.support.chat_families import trl_tokenizer
from tests.support.chat_samples import LOOK_UP, calling, printed_turn
from toolgrpo.calls import AttemptStatus
from toolgrpo.chat import family_templates, resolve_format, tool_message
from toolgrpo.chat.encoding import Guard
from toolgrpo.chat.format import TemplateFormat
from toolgrpo.chat.response_template import described_format, response_template_of
from toolgrpo.chat.turn_reader import TurnReader

pytestmark = pytest.mark.contract

OK = AttemptStatus.OK
Calls = list[tuple[str, dict[str, Any]]]
RAISES = "raises"
GOOD = '{"name": "f", "arguments": {}}'
CALLED = [("look_up", {"key": 'a "b" <c>, {d}'}), ("other", {"key": "two\nlines"})]

# Template and turn; the calls that are read; those that transformers' parser finds with TRL's response template; those
# that our reader finds with it (None: it is refused). Where the last are all of ours, TRL's is taken as it is.
WORSE: dict[str, tuple[str, str, Calls, Calls | str, Calls | None]] = {
    "a bad call takes the good one with it": (
        "qwen3",
        f"<tool_call>{GOOD}</tool_call><tool_call>{{</tool_call>",
        [("f", {})],
        RAISES,
        [("f", {})],
    ),
    "a call that was cut counts": ("qwen3", f"<tool_call>{GOOD}", [], [("f", {})], []),
    "an argument that was not closed vanishes": (
        "qwen3_5_think",
        "<tool_call><function=f><parameter=a>x</function></tool_call>",
        [],
        [("f", {})],
        [],
    ),
    "the space around a value is lost": (
        "qwen3_5_think",
        "<tool_call><function=f><parameter=a>\n  x\n\n</parameter></function></tool_call>",
        [("f", {"a": "  x\n"})],
        [("f", {"a": "x"})],
        [("f", {"a": "x"})],
    ),
    "without line breaks the arguments are the name": (
        "glm4moe",
        "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>",
        [("f", {"a": "x"})],
        [("f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>", {})],
        None,
    ),
    "the recipient behind the channel, as OpenAI writes it": (
        "gptoss",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("f", {"a": 1})],
        [],
        None,
    ),
    "a space between arguments": (
        "gemma4",
        "<|tool_call>call:f{a:1, b:2}<tool_call|>",
        [("f", {"a": 1, "b": 2})],
        RAISES,
        [],
    ),
    "a name with a hyphen": ("gemma4", "<|tool_call>call:get-it{}<tool_call|>", [("get-it", {})], RAISES, []),
    "False": (
        "lfm2_2_5",
        "<|tool_call_start|>[f(flag=False)]<|tool_call_end|>",
        [("f", {"flag": False})],
        [("f", {"flag": "False"})],
        [("f", {"flag": "False"})],
    ),
    "words with a comma and a bracket": ("lfm2_2_5", "Compare sin(x), cos() now.", [], [("cos", {})], [("cos", {})]),
    "two calls in a turn": (
        "llama3_1",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}<|eot_id|>',
        [("f", {}), ("g", {})],
        RAISES,
        [],
    ),
    "a space in a call": ("llama3_1", '{ "name": "f", "parameters": {}}<|eot_id|>', [("f", {})], [], []),
    "a call that an answer only shows": (
        "llama3_1",
        'One writes {"name": "f", "parameters": {}}<|eot_id|>',
        [],
        [("f", {})],
        [("f", {})],
    ),
}


def by_trls(name: str) -> TemplateFormat:
    """A format that reads by TRL's response template and nothing else."""
    chat = described_format(trl_tokenizer(name))
    assert chat is not None
    return chat


def found(chat: TemplateFormat, said: str) -> Calls:
    attempts = chat.parse(chat.encode(said)).attempts
    return [(str(a.name), dict(a.arguments or {})) for a in attempts if a.status is OK]


@pytest.mark.parametrize("what", WORSE)
def test_why_a_known_family_has_a_template_of_its_own(what: str) -> None:
    name, said, ours, theirs, from_template = WORSE[what]
    chat = resolve_format(trl_tokenizer(name))
    assert isinstance(chat, TemplateFormat) and found(chat, said) == ours
    if from_template is not None:
        assert found(by_trls(name), said) == from_template
    spec = response_template_of(trl_tokenizer(name))
    if theirs == RAISES:
        with pytest.raises(ValueError, match="could not parse"):
            parse_response(said, spec, prefix="")
        return
    calls = [call["function"] for call in parse_response(said, spec, prefix="").get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in calls] == theirs != ours


def patterns(template: Any) -> dict[str, tuple[Any, ...]]:
    """What a response template says of calls and thoughts."""
    fields = {name: field for name, field in load_response_template(template).fields.items() if name != "content"}
    return {
        name: (field.open_re.pattern, field.close_re.pattern, field.content, field.content_args, field.transform)
        for name, field in fields.items()
    }


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"])
def test_where_trls_template_reads_as_well_it_is_taken_as_it_is(name: str) -> None:
    tokenizer = trl_tokenizer(name)
    chat, theirs = resolve_format(tokenizer), response_template_of(tokenizer)
    assert isinstance(chat, TemplateFormat) and isinstance(chat.reader, TurnReader) and theirs is not None
    assert chat.family.form is family_templates.HERMES
    assert chat.reader.call.field == load_response_template(theirs).fields["tool_calls"]
    assert "<|im_end|>" in chat.reader.markers, "only TRL's template speaks of it, ours does not"
    assert patterns(family_templates.HERMES.template) == patterns(theirs), "the copy says what TRL's says"


def test_a_template_that_trl_does_not_know_to_the_letter_is_read_by_the_familys_copy() -> None:
    tokenizer = trl_tokenizer("qwen3")
    tokenizer.chat_template += "{# changed #}"
    assert response_template_of(tokenizer) is None
    chat = resolve_format(tokenizer)
    assert isinstance(chat, TemplateFormat) and chat.name == "qwen3" and "<|im_end|>" not in chat.reader.markers
    assert found(chat, f"<tool_call>{GOOD}</tool_call>") == [("f", {})]


def test_a_tokenizers_own_template_counts_in_a_known_family_unless_it_does_not_hold() -> None:
    spec = response_template_of(trl_tokenizer("qwen3"))
    assert spec is not None
    calls = {**spec["fields"]["tool_calls"], "open": "<call>"}
    for own, held in ((spec, True), ({**spec, "fields": {**spec["fields"], "tool_calls": calls}}, False), ({}, False)):
        tokenizer = trl_tokenizer("qwen3")
        tokenizer.chat_template += "{# changed #}"
        tokenizer.response_template = own
        chat = resolve_format(tokenizer)
        assert isinstance(chat, TemplateFormat) and chat.name == "qwen3"
        assert ("<|im_end|>" in chat.reader.markers) == held
        assert found(chat, f"<tool_call>{GOOD}</tool_call>") == [("f", {})]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "glm4moe", "llama3_1", "gptoss"])
def test_a_corrected_template_is_in_transformers_format(name: str) -> None:
    """Its parser reads with it what the model's own template prints."""
    chat = resolve_format(trl_tokenizer(name))
    assert isinstance(chat, TemplateFormat) and chat.family.form.call.body is None
    calls = CALLED[:1] if chat.family.one_call else CALLED
    results = [tool_message(called, "r") for called, _ in calls]
    turn = printed_turn(chat, [{"role": "user", "content": "q"}], calling(*calls), results, [LOOK_UP])
    before, said = chat._decode(turn.before), chat._decode(turn.said)
    read = parse_response(said, chat.family.form.template, prefix=before)
    functions = [call["function"] for call in read["tool_calls"]]
    arguments = [call.get("arguments", call.get("parameters")) for call in functions]
    assert [(call["name"], args) for call, args in zip(functions, arguments, strict=True)] == calls


def test_transformers_parser_takes_markers_in_letters_for_markers() -> None:
    """It sees text only, in which a quoted marker and a control token are the same."""
    chat = by_trls("qwen3")
    said = f"A call is <tool_call>{GOOD}</tool_call>."
    ids = chat.encode(Guard(chat.control).text(said))
    assert chat.parse(ids).content == said and chat.parse(ids).attempts == ()
    spec = response_template_of(trl_tokenizer("qwen3"))
    assert len(parse_response(chat._decode(ids), spec, prefix="")["tool_calls"]) == 1
