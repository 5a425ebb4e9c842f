"""What the reader makes of a turn of each family, on segments; no tokenizer."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from toolgrpo.chat.attempts import CallForm, Marker, Segment
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.families import FAMILIES
from toolgrpo.chat.turn_reader import TurnReader
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt

CALL, CALL_END, THINK, THINK_END = map(Marker, ("<tool_call>", "</tool_call>", "<think>", "</think>"))
DEEPSEEK = (
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁sep｜>",
)
TOKENS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"),
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
    *("<|channel>", "<channel|>", "<|END_RESPONSE|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *DEEPSEEK,
)
GOOD = '{"name": "f", "arguments": {}}'
WHOLE: list[Segment] = [CALL, GOOD, CALL_END]
WRITTEN = f"<tool_call>{GOOD}</tool_call>"
OK, INVALID, UNCLOSED = AttemptStatus.OK, AttemptStatus.INVALID_JSON, AttemptStatus.UNCLOSED
NAMELESS, BAD = AttemptStatus.MISSING_NAME, AttemptStatus.BAD_ARGUMENTS


@cache
def reader(name: str) -> TurnReader:
    """The reader of a family whose markers are all tokens."""
    family = next(family for family in FAMILIES if family.name == name)
    template = load_response_template(family.form.template)
    return TurnReader(template, TOKENS, family.ends, family.form.call, family.form.lead)


def read(name: str, segments: list[Segment], *, closed: bool = True, thinking: bool = False) -> ParsedTurn:
    return reader(name).read(segments, closed=closed, thinking=thinking)


def called(name: str, body: list[Segment]) -> tuple[CallAttempt, ...]:
    """The attempts in one call of this family, closed as it should be."""
    form = reader(name).call.form
    return read(name, [Marker(form.opening[0]), *body, Marker(form.closing)]).attempts


def check(attempt: CallAttempt, status: AttemptStatus) -> None:
    assert attempt.status is status
    assert bool(attempt.detail) == (status is not OK)
    assert (attempt.arguments is None) == (status is not OK)
    json.dumps(attempt.arguments, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("segments", "reasoning", "content", "statuses"),
    [
        ([THINK, "\nhm\n", THINK_END, "\n\nok\n", *WHOLE, CALL, "{", CALL_END], "hm", "ok", [OK, INVALID]),
        # space between the words around a call or a thought is kept
        (["a", *WHOLE, "\nb"], None, "a\nb", [OK]),
        ([THINK, "hm", THINK_END, "\n\n  a", *WHOLE, "\n"], "hm", "  a", [OK]),
        # thoughts apart are lines
        ([THINK, "\none\n", THINK_END, "a", THINK, "two", THINK_END, THINK, THINK_END, " b"], "one\ntwo", "a b", []),
        # a call inside any thinking is no call
        ([THINK, *WHOLE, THINK_END, "done"], WRITTEN, "done", []),
        ([THINK, "first", THINK_END, THINK, *WHOLE, THINK_END, "done"], f"first\n{WRITTEN}", "done", []),
        # text without thinking or calls is untouched
        (["\n a\n"], None, "\n a\n", []),
        ([CALL_END, "x"], None, "</tool_call>x", []),
    ],
)
def test_thinking_content_and_calls_are_kept_apart_in_order(
    segments: list[Segment], reasoning: str | None, content: str, statuses: list[AttemptStatus]
) -> None:
    turn = read("qwen3", segments)
    assert (turn.reasoning, turn.content, turn.closed) == (reasoning, content, True)
    assert [attempt.status for attempt in turn.attempts] == statuses


def test_thinking_that_the_prompt_opened() -> None:
    thought: list[Segment] = ["hm", *WHOLE]
    whole = read("qwen3", [*thought, THINK_END, "done"])
    unfinished = read("qwen3", thought, closed=False, thinking=True)
    assert (whole.content, unfinished.content) == ("done", "")
    for turn in (whole, unfinished):
        assert turn.reasoning == f"hm{WRITTEN}" and turn.attempts == ()


def test_a_call_that_is_cut_or_opened_twice_is_unclosed() -> None:
    turn = read("qwen3", [CALL, "a", CALL, "b"], closed=False)
    assert [(a.status, a.raw) for a in turn.attempts] == [(UNCLOSED, "a"), (UNCLOSED, "b")]


def test_the_label_of_gemmas_thinking_means_nothing() -> None:
    opening, closing = map(Marker, ("<|channel>", "<channel|>"))
    for thought in ("thought\nhm\n", "hm\n"):
        turn = read("gemma4", [opening, thought, closing, "done"])
        assert (turn.reasoning, turn.content) == ("hm", "done")


def test_a_silent_marker_says_nothing() -> None:
    for call, statuses in ((), []), (WHOLE, [OK]):
        turn = read("cohere2", ["Hi", *call, Marker("<|END_RESPONSE|>")])
        assert (turn.content, [attempt.status for attempt in turn.attempts]) == ("Hi", statuses)


@pytest.mark.parametrize("pattern", [r"\b", r"x*", "$", r"\G"])
def test_patterns_that_match_nothing_come_to_an_end(pattern: str) -> None:
    """As a stranger's response template may have them."""
    calls = {"open_pattern": pattern, "close_pattern": pattern, "content": "json"}
    fields = {"tool_calls": calls, "content": {"close_pattern": pattern, "repeats": True}}
    template = load_response_template({"start_anchor": "x", "fields": fields})
    turn = TurnReader(template, (), ("<end>",), CallForm("{}", "")).read(["a xx b"], closed=True, thinking=False)
    assert len(turn.attempts) < 10


KEY, KEY_END, VALUE, VALUE_END = map(Marker, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
QUOTED = Marker('<|"|>')
OTHER_FORMS = ("qwen3.5", "glm4", "gemma4", "lfm2")


@pytest.mark.parametrize(
    ("name", "body", "status", "arguments"),
    [
        ("qwen3", ['{"name": "f", "arguments": "{\\"a\\": 1}"}'], OK, {"a": 1}),
        ("qwen3", ['{"name": "f"}'], OK, {}),
        ("qwen3", ['{"name": "f", "arguments": null}'], OK, {}),
        ("qwen3", ['{"name": "f", "parameters": {"a": 1}}'], OK, {"a": 1}),
        ("qwen3", ['{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}'], OK, {"a": 1}),
        ("qwen3", ['{"function": "f", "arguments": {"a": 1}}'], OK, {"a": 1}),
        ("qwen3", ['{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 1}}'], OK, {"a": 1}),
        ("qwen3", ['{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}'], BAD, None),
        ("qwen3", ['{"name": "f", "args": {"a": 1}}'], BAD, None),
        ("qwen3", ['{"name": "f", "arguments": [1]}'], BAD, None),
        *(("qwen3", [raw], NAMELESS, None) for raw in ('{"arguments": {}}', '{"name": 3}', "[]", "[5]")),
        ("qwen3", ['{"name": "f", "arguments": "{"}'], INVALID, None),
        ("qwen3", ['{"name": "f", "arguments": {"a": 1e999}}'], INVALID, None),
        ("qwen3", ['{"name": "f", "arguments": {"a": "\\ud800"}}'], INVALID, None),
        ("qwen3", ['{"name": "f\\udfff", "arguments": [1]}'], INVALID, None),
        ("qwen3", ["<name>f</name><arguments>{</arguments>"], AttemptStatus.XML, None),
        *(("qwen3", [raw], INVALID, None) for raw in ("", "[" * 100_000)),
        ("qwen3", ['{"name": "f", "arguments": ' + '{"a":' * 600 + "1" + "}" * 601], INVALID, None),
        ("qwen3.5", ["\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"], OK, {"a": "1"}),
        ("qwen3.5", ["<function=f>"], OK, {}),
        ("qwen3.5", ["<function=f><parameter=a>x<b>\n\n</parameter></function>"], OK, {"a": "x<b>\n"}),
        *(("qwen3.5", [f"<function=f>\n{raw}\n</function>"], INVALID, None) for raw in ("<parameter=a>\n1", "hm")),
        *(("qwen3.5", [raw], NAMELESS, None) for raw in ("<function=>\n</function>", '{"name": "f"}')),
        ("glm4", ["f\n", KEY, "a", KEY_END, "\n", VALUE, "x", VALUE_END, "\n"], OK, {"a": "x"}),
        ("glm4", ["f", KEY, "a", KEY_END, VALUE, VALUE_END], OK, {"a": ""}),
        ("glm4", ["f", KEY, "a", KEY_END, VALUE, "<arg_value>", VALUE_END], OK, {"a": "<arg_value>"}),
        ("glm4", ["f\n"], OK, {}),
        ("glm4", [KEY, "a", KEY_END], NAMELESS, None),
        ("glm4", ["f", KEY, "a", KEY_END, "\n"], INVALID, None),
        ("glm4", ["f", VALUE, "a", VALUE_END], INVALID, None),
        ("glm4", ["f", KEY, "a", KEY_END, "hm", VALUE, "x", VALUE_END], INVALID, None),
        ("gemma4", ["call:f{a:", QUOTED, 'x "y", b:1\n', QUOTED, ", b:1}"], OK, {"a": 'x "y", b:1\n', "b": 1}),
        ("gemma4", ["call:f{b:[1,", QUOTED, "z", QUOTED, "],c:{d:true}}"], OK, {"b": [1, "z"], "c": {"d": True}}),
        ("gemma4", ["call:get-it{}"], OK, {}),
        ("gemma4", ['call:f{a:"x, b: \\"{c: d}",e:1}'], OK, {"a": 'x, b: "{c: d}', "e": 1}),
        ("gemma4", ["call:f{a:-1.5,b_c:null}"], OK, {"a": -1.5, "b_c": None}),
        ("gemma4", ["call:f{a:", QUOTED, "x"], UNCLOSED, None),
        ("gemma4", ["call:f{a:}"], INVALID, None),
        *(("gemma4", body, NAMELESS, None) for body in (["call:{}"], ["f{}"], [QUOTED, "call:f{}", QUOTED])),
        # JSON between the markers of another form
        *((name, ['{"name": "f", "arguments": {"a": 1}}'], OK, {"a": 1}) for name in OTHER_FORMS),
    ],
)
def test_a_call_between_markers(
    name: str, body: list[Segment], status: AttemptStatus, arguments: dict[str, object] | None
) -> None:
    """None runs without arguments that stand in it. `parameters` is what Llama and OpenAI's schemas call them."""
    (attempt,) = called(name, body)
    check(attempt, status)
    assert attempt.arguments == arguments
    said = "".join(part if isinstance(part, str) else part.text for part in body)
    assert attempt.raw == (said.partition("</function>")[0] if name == "qwen3.5" else said)
    assert status is not OK or attempt.name in ("f", "get-it")


def test_a_list_between_markers_is_several_calls() -> None:
    """As SmolLM2's card shows them."""
    attempts = called("qwen3", ['[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "parameters": {}}]'])
    assert [(attempt.status, attempt.arguments) for attempt in attempts] == [(OK, {"a": 1}), (OK, {})]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("[f(a='x', b=-1), server.g()]", [(OK, "f", {"a": "x", "b": -1}), (OK, "server.g", {})]),
        ("[f(a='two\nlines', b=\"it's\")]", [(OK, "f", {"a": "two\nlines", "b": "it's"})]),
        ("""[f(a='''say 'x = g(2)'\nit''', b='')]""", [(OK, "f", {"a": "say 'x = g(2)'\nit", "b": ""})]),
        ("[f(a={'k': [1, true, null]}, b=None)]", [(OK, "f", {"a": {"k": [1, True, None]}, "b": None})]),
        ("f(a=1)", [(OK, "f", {"a": 1})]),
        ("[查询(城市='北京', über=1, b # c\n=2)]", [(OK, "查询", {"城市": "北京", "über": 1, "b": 2})]),
        (
            "[get-it(from='a=b(c', max-n=5), a.b(in=1)]",
            [(OK, "get-it", {"from": "a=b(c", "max-n": 5}), (OK, "a.b", {"in": 1})],
        ),
        ("[f(a='\\d+')]", [(OK, "f", {"a": "\\d+"})]),
        *((raw, [(BAD, "f", None)]) for raw in ("[f(1)]", "[f(**x)]")),
        *((f"[f(a={a})]", [(INVALID, "f", None)]) for a in ("open('x')", "{**b}", "1e999", "'\\ud800'")),
        *((raw, [(NAMELESS, None, None)]) for raw in ("[]", "['f']", "[f()()]")),
        *(
            (f"{raw}1)", [(INVALID, None, None)])
            for raw in ("[f(a='", "-" * 100_000, "f" * 100_000 + ".", "f " * 100_000, "f(a=" + "1+" * 100_000)
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_calls_of_python(raw: str, expected: list[tuple[AttemptStatus, str | None, object]]) -> None:
    attempts = called("lfm2", [raw])
    assert [(a.status, a.name, a.arguments) for a in attempts] == expected
    for attempt in attempts:
        check(attempt, attempt.status)


@pytest.mark.parametrize(
    ("segments", "closed", "statuses", "content"),
    [
        (['{"name": "f", "parameters": {"a": 1}}'], True, [OK], ""),
        (['\n{ "name" : "f", "arguments": {}}'], True, [OK], ""),
        ([Marker("<|python_tag|>"), '{"name": "f", "parameters": {}}'], True, [OK], ""),
        ([Marker("<|python_tag|>"), "f.call(a=1)"], True, [INVALID], ""),
        (['{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}} done'], True, [OK, OK], "done"),
        (['{"name": "f", "parameters": {}, "a": 1}'], True, [BAD], ""),
        (['{"name": "f", "parameters": {"a'], False, [UNCLOSED], ""),
        (['{"name": "f", "parameters": {"a'], True, [INVALID], ""),
        (['{"name": "f", "parameters": 3}'], True, [BAD], ""),
        (['{"name": "f", "parameters": {"a": "}; {\\"\\\\"}} ok'], True, [OK], "ok"),
        (['{"name": "f", "parameters": {a}} {"name": "g", "parameters": {}}'], True, [INVALID, OK], ""),
        (['{"name": "f"} and {"name": "g"}'], True, [OK], 'and {"name": "g"}'),
        (['I say {"name": 1}'], True, [], 'I say {"name": 1}'),
        ([], True, [], ""),
    ],
)
def test_a_turn_of_llama(segments: list[Segment], closed: bool, statuses: list[AttemptStatus], content: str) -> None:
    turn = read("llama3.1", segments, closed=closed)
    assert [attempt.status for attempt in turn.attempts] == statuses and turn.content == content
    for attempt in turn.attempts:
        check(attempt, attempt.status)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"type": "function", "function": {"name": "f"}, "arguments": {"a": 1}}, {"a": 1}),
        ({"function": {"name": "f", "arguments": {"a": 1}}, "arguments": {"a": 1}}, {"a": 1}),
        ({"function": {"name": "f", "arguments": {"a": 1}}, "arguments": {"b": 2}}, None),
        ({"function": {"name": "f"}, "arguments": {"a": 1}, "parameters": {"b": 2}}, None),
        ({"function": {"function": {"name": "f"}, "arguments": {"a": 1}}, "arguments": {"b": 1}}, None),
        ({"name": "f", "arguments": {}, "index": 0}, {}),
        ({"name": "f", "arguments": ""}, {}),
        ({"name": "f", "arguments": "", "a": 1}, None),
    ],
)
def test_no_call_loses_arguments_that_stand_outside_of_its_function(call: Any, arguments: Any) -> None:
    (attempt,) = called("qwen3", [json.dumps(call)])
    assert attempt.arguments == arguments and (attempt.status is OK) == (arguments is not None)


HARMONY = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>")
START, END, CHANNEL, MESSAGE, CONSTRAIN = map(Marker, HARMONY)
ANALYSIS: list[Segment] = [CHANNEL, "analysis", MESSAGE, "hm", END, START, "assistant"]


def test_a_turn_of_harmony() -> None:
    forms: list[list[Segment]] = [
        [" to=functions.f", CHANNEL, "commentary json", MESSAGE, '{"a": 1}'],
        [CHANNEL, "commentary to=functions.f ", CONSTRAIN, "json", MESSAGE, '{"a": 1}'],
    ]
    for form in forms:
        turn = read("gpt-oss", [*ANALYSIS, *form])
        (attempt,) = turn.attempts
        assert (attempt.status, attempt.name, attempt.arguments) == (OK, "f", {"a": 1})
        assert turn.reasoning == "hm" and turn.content == ""
        cut = read("gpt-oss", [*ANALYSIS, *form], closed=False)
        assert [attempt.status for attempt in cut.attempts] == [UNCLOSED]
    answer = read("gpt-oss", [*ANALYSIS, CHANNEL, "final", MESSAGE, "42"])
    assert (answer.content, answer.reasoning, answer.attempts) == ("42", "hm", ())


@pytest.mark.parametrize(
    ("segments", "content", "calls"),
    [
        ([CHANNEL, "commentary", MESSAGE, "Wait.", END, CHANNEL, "final", MESSAGE, "x"], "Wait.\nx", 0),
        (["no header", END, CHANNEL, "final", MESSAGE, "x"], "no header\nx", 0),
        ([CHANNEL, "commentary to=assistant", MESSAGE, "{}"], "{}", 0),
        ([CHANNEL, "analysis to=functions.f", MESSAGE, "{}", END, CHANNEL, "final", MESSAGE, "x"], "x", 1),
        (["to=f", MESSAGE, "{}", Marker("<|call|>"), START, "assistant to=g", MESSAGE, "{}"], "", 2),
        ([CHANNEL, "final ", CONSTRAIN, "json", MESSAGE, "a ", MESSAGE, "to=f"], "a <|message|>to=f", 0),
        ([" to=functions.f", CHANNEL, "commentary", MESSAGE, ""], "", 1),
    ],
)
def test_messages_of_harmony(segments: list[Segment], content: str, calls: int) -> None:
    turn = read("gpt-oss", [*ANALYSIS[:-2], *segments])
    assert (turn.content, turn.reasoning) == (content, "hm")
    assert [attempt.status for attempt in turn.attempts] == [OK] * calls


@pytest.mark.parametrize(
    "segments",
    [[*ANALYSIS[:-3], '{"name": "f"} to=functions.f'], ["no header at all"], [MESSAGE, MESSAGE, START, START, END]],
)
def test_what_holds_no_call_of_harmony_makes_none(segments: list[Segment]) -> None:
    assert not read("gpt-oss", segments).attempts


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "f", "parameters": {"a": "x"}}',
        '{"type": "function", "function": {"name": "f", "parameters": {"a": "x"}}}',
        '{"parameters": {"a": "x"}, "name": "f"}',
        '<function=f>{"a": "x"}</function>',
        'I will look.\n<function=f>{"a": "x"}<function>',
        '[f(a="x")]',
        '[{"name": "f", "parameters": {"a": "x"}}]',
        'I will look.\n{"name": "f", "parameters": {"a": "x"}}',
        'I will look.\n\n{"function": "f", "parameters": {"a": "x"}};\n',
    ],
)
def test_what_llama_writes_in_other_words_is_a_call(text: str) -> None:
    turn = read("llama3.1", [text])
    assert [(attempt.status, attempt.name, attempt.arguments) for attempt in turn.attempts] == [(OK, "f", {"a": "x"})]
    assert turn.content == ("I will look." if text.startswith("I") else "")


@pytest.mark.parametrize(
    "text",
    [
        *('A call is\n{"name": "f", "parameters": {}}\nin this form.', 'The answer:\n{"total": 3, "items": [1, 2]}'),
        *("[1, 2, 3]", '[{"name": "Ann"}, {"name": "Bob"}]', "[see (1)]", "Write <function=f> to call it."),
        *('{"type": "circle", "radius": 2}', "\n{" * 40 + "}" * 40 + " is nothing"),
    ],
)
def test_an_answer_of_llama_that_looks_like_a_call_is_an_answer(text: str) -> None:
    turn = read("llama3.1", [text])
    assert turn.attempts == () and turn.content == text


BARE = "<function=f>\n<parameter=a>\nx < y\n</parameter>\n</function>"


@pytest.mark.parametrize("end", [[], ["\n"], ["\n", CALL_END], ["\n", CALL_END, "\n", BARE]])
def test_a_call_of_qwen_coder_without_its_opening_is_a_call(end: list[Segment]) -> None:
    """As vLLM's parser reads it."""
    turn = read("qwen3.5", ["I will look.\n", BARE, *end])
    calls = [(attempt.status, attempt.name, attempt.arguments) for attempt in turn.attempts]
    assert calls == [(OK, "f", {"a": "x < y"})] * (2 if BARE in end else 1) and turn.content == "I will look."


def test_a_call_of_qwen_coder_that_nothing_opens_and_closes_is_an_attempt() -> None:
    (attempt,) = read("qwen3.5", [BARE.partition("</parameter>")[0]]).attempts
    assert (attempt.status, attempt.name) == (UNCLOSED, "f")


@pytest.mark.parametrize("text", [f"A call is\n{BARE}\nin this form.", "<function=f> begins one.", f"As in `{BARE}`"])
def test_an_answer_of_qwen_coder_that_shows_a_call_is_an_answer(text: str) -> None:
    turn = read("qwen3.5", [text])
    assert turn.attempts == () and turn.content == text


LETTERS = "[ARGS] [TOOL_CALLS]"
M_CALL, M_ARGS, M_ID = map(Marker, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([M_CALL, '[{"name": "f", "arguments": {"a": 1}, "id": "abcdefgh1"}]'], [("f", {"a": 1}, "abcdefgh1")]),
        ([M_CALL, '[{"name": "f"}, {"name": "g", "arguments": {}}]'], [("f", {}, None), ("g", {}, None)]),
        ([M_CALL, "f", M_ARGS, '{"a": 1}', M_CALL, "g", M_ARGS, "{}"], [("f", {"a": 1}, None), ("g", {}, None)]),
        ([M_CALL, "f", M_ID, "abcdefgh1", M_ARGS, '{"a": 1}'], [("f", {"a": 1}, "abcdefgh1")]),
        ([M_CALL, "f", M_ID, "short", M_ARGS, f'{{"a": "{LETTERS}"}}'], [("f", {"a": LETTERS}, None)]),
        (["so ", M_CALL, "f", M_ARGS, " "], [("f", {}, None)]),
    ],
)
def test_calls_of_mistral_in_both_spellings(segments: list[Segment], expected: list[object]) -> None:
    turn = read("mistral", segments)
    assert [(attempt.name, attempt.arguments, attempt.call_id) for attempt in turn.attempts] == expected
    assert turn.content == ("so " if segments[0] == "so " else "")


D_BEGIN, D_END, D_CALLS, D_CALLS_END, D_SEP = map(Marker, DEEPSEEK)
V3 = [D_BEGIN, "function", D_SEP, 'f\n```json\n{"a": "```"}\n```', D_END]
V31 = [D_BEGIN, "f", D_SEP, '{"a": "```"}', D_END]


@pytest.mark.parametrize("call", [V3, V31])
def test_calls_of_deepseek_in_both_spellings(call: list[Segment]) -> None:
    turn = read("deepseek", ["so ", D_CALLS, *call, "\n", *call, D_CALLS_END])
    assert [(attempt.name, attempt.arguments) for attempt in turn.attempts] == [("f", {"a": "```"})] * 2
    assert turn.content.strip() == "so"
    (hermes,) = read("deepseek", [CALL, '{"name": "f", "arguments": {"a": 1}}', CALL_END]).attempts
    assert (hermes.name, hermes.arguments) == ("f", {"a": 1})


@pytest.mark.parametrize(
    ("name", "segments", "status"),
    [
        ("gpt-oss", [" to=functions.", CHANNEL, "commentary", MESSAGE, "{}"], NAMELESS),
        ("gpt-oss", [" to=functions.f", CHANNEL, "commentary", MESSAGE, "{"], INVALID),
        ("gpt-oss", [" to=functions.f", CHANNEL, "commentary", MESSAGE, "[]"], BAD),
        ("llama3.1", ['<function=f>{"a": "x"'], UNCLOSED),
        ("llama3.1", ["<function=f>a: x</function>"], INVALID),
        ("llama3.1", ['{"type": "function", "name": "f", "para'], INVALID),
        ("llama3.1", ['[f("x")]'], BAD),
        *(("llama3.1", [raw + '{"name": "f", "parameters": {"a": NaN}}'], INVALID) for raw in ("", "so\n")),
        ("mistral", [M_CALL, "f", M_ARGS, '{"a": '], INVALID),
        *(("mistral", [M_CALL, raw], INVALID) for raw in ("f [ARGS]{}", "")),
        *(("mistral", [M_CALL, raw], NAMELESS) for raw in ('[{"arguments": {}}]', "[]")),
        ("mistral", [M_CALL, "f", M_ARGS, "[1]"], BAD),
        ("deepseek", [D_CALLS, D_BEGIN, "", D_SEP, "{}", D_END, D_CALLS_END], NAMELESS),
        ("deepseek", [D_CALLS, D_BEGIN, "f", D_SEP, "{", D_END, D_CALLS_END], INVALID),
        ("deepseek", [D_CALLS, D_BEGIN, "f {}", D_END, D_CALLS_END], INVALID),
        ("deepseek", [D_CALLS, D_BEGIN, "f", D_SEP, "{}", D_CALLS_END], UNCLOSED),
        ("deepseek", [D_CALLS, D_BEGIN, "f", D_SEP, "[1]", D_END, D_CALLS_END], BAD),
    ],
)
def test_a_call_that_cannot_be_read_is_an_attempt(name: str, segments: list[Segment], status: AttemptStatus) -> None:
    (attempt,) = read(name, segments).attempts
    check(attempt, status)


@pytest.mark.parametrize(
    ("name", "segments", "said"),
    [
        ("qwen3.5", [CALL, "\n<function=f>\n<parameter=a>"], "f"),
        ("glm4", [CALL, "f\n", KEY], "f"),
        ("gemma4", [Marker("<|tool_call>"), "call:f{a:"], "f"),
        ("gpt-oss", [" to=functions.f", CHANNEL, "commentary", MESSAGE, "{"], "f"),
        ("mistral", [M_CALL, "f", M_ARGS, '{"a": 1}'], None),
        ("mistral", [M_CALL, '[{"name": "f", "arguments": {'], None),
    ],
)
def test_a_call_that_was_cut_is_unclosed_and_most_keep_its_name(
    name: str, segments: list[Segment], said: str | None
) -> None:
    (attempt,) = read(name, segments, closed=False).attempts
    check(attempt, UNCLOSED)
    assert attempt.name == said
