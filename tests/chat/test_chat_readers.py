"""What the reader makes of a turn of each family, on segments; no tokenizer."""

from __future__ import annotations

import json
from functools import cache

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from toolgrpo.chat.attempts import CallForm, Marker, Segment
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.families import FAMILIES
from toolgrpo.chat.turn_reader import TurnReader
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt

CALL, CALL_END, THINK, THINK_END = map(Marker, ("<tool_call>", "</tool_call>", "<think>", "</think>"))
TOKENS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"),
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
    *("<|channel>", "<channel|>", "<|END_RESPONSE|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
GOOD = '{"name": "f", "arguments": {}}'
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


def test_thinking_content_and_calls_are_kept_apart_in_order() -> None:
    segments: list[Segment] = [THINK, "\nhm\n", THINK_END, "\n\nok\n", CALL, GOOD, CALL_END, CALL, "{", CALL_END]
    turn = read("qwen3", segments)
    assert (turn.reasoning, turn.content, turn.closed) == ("hm", "ok", True)
    assert [attempt.status for attempt in turn.attempts] == [OK, INVALID]


@pytest.mark.parametrize("before", [[], [THINK, "first", THINK_END]])
def test_a_call_inside_any_thinking_is_no_call(before: list[Segment]) -> None:
    turn = read("qwen3", [*before, THINK, CALL, GOOD, CALL_END, THINK_END, "done"])
    assert turn.attempts == () and turn.content == "done"


def test_thinking_that_the_prompt_opened() -> None:
    turn = read("qwen3", ["hm", CALL, GOOD, CALL_END, THINK_END, "done"])
    assert turn.reasoning == f"hm<tool_call>{GOOD}</tool_call>" and turn.content == "done" and turn.attempts == ()
    unfinished = read("qwen3", ["hm", CALL, GOOD, CALL_END], closed=False, thinking=True)
    assert unfinished.attempts == () and unfinished.content == ""
    assert unfinished.reasoning == f"hm<tool_call>{GOOD}</tool_call>"


def test_a_call_that_is_cut_or_opened_twice_is_unclosed() -> None:
    turn = read("qwen3", [CALL, "a", CALL, "b"], closed=False)
    assert [(a.status, a.raw) for a in turn.attempts] == [(UNCLOSED, "a"), (UNCLOSED, "b")]


def test_space_between_the_words_around_a_call_or_a_thought_is_kept() -> None:
    assert read("qwen3", ["a", CALL, GOOD, CALL_END, "\nb"]).content == "a\nb"
    assert read("qwen3", [THINK, "hm", THINK_END, "\n\n  a", CALL, GOOD, CALL_END, "\n"]).content == "  a"


def test_thoughts_apart_are_lines() -> None:
    turn = read("qwen3", [THINK, "\none\n", THINK_END, "a", THINK, "two", THINK_END, THINK, THINK_END, " b"])
    assert (turn.reasoning, turn.content) == ("one\ntwo", "a b")


def test_the_label_of_gemmas_thinking_means_nothing() -> None:
    opening, closing = map(Marker, ("<|channel>", "<channel|>"))
    for thought in ("thought\nhm\n", "hm\n"):
        turn = read("gemma4", [opening, thought, closing, "done"])
        assert (turn.reasoning, turn.content) == ("hm", "done")


def test_a_silent_marker_says_nothing() -> None:
    assert read("cohere2", ["Hi", Marker("<|END_RESPONSE|>")]).content == "Hi"
    segments: list[Segment] = ["Hi", CALL, GOOD, CALL_END, Marker("<|END_RESPONSE|>")]
    turn = read("cohere2", segments)
    assert (turn.content, [attempt.status for attempt in turn.attempts]) == ("Hi", [OK])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3.5", [CALL, "\n<function=f>\n<parameter=a>"]),
        ("glm4", [CALL, "f\n", Marker("<arg_key>")]),
        ("gemma4", [Marker("<|tool_call>"), "call:f{a:"]),
        ("gpt-oss", [" to=functions.f", Marker("<|channel|>"), "commentary", Marker("<|message|>"), "{"]),
    ],
)
def test_a_call_that_was_cut_behind_its_name_keeps_it(name: str, said: list[Segment]) -> None:
    (attempt,) = read(name, said, closed=False).attempts
    assert (attempt.status, attempt.name) == (UNCLOSED, "f")


@pytest.mark.parametrize("pattern", [r"\b", r"x*", "$", r"\G"])
def test_patterns_that_match_nothing_come_to_an_end(pattern: str) -> None:
    """As a stranger's response template may have them."""
    calls = {"open_pattern": pattern, "close_pattern": pattern, "content": "json"}
    fields = {"tool_calls": calls, "content": {"close_pattern": pattern, "repeats": True}}
    template = load_response_template({"start_anchor": "x", "fields": fields})
    turn = TurnReader(template, (), ("<end>",), CallForm("{}", "")).read(["a xx b"], closed=True, thinking=False)
    assert len(turn.attempts) < 10


def test_text_without_thinking_or_calls_is_untouched() -> None:
    assert read("qwen3", ["\n a\n"]).content == "\n a\n"
    assert read("qwen3", [CALL_END, "x"]).content == "</tool_call>x"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (GOOD, OK),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', OK),
        ('{"name": "f"}', OK),
        ('{"name": "f", "arguments": null}', OK),
        ('{"arguments": {}}', NAMELESS),
        ('{"name": 3}', NAMELESS),
        ("[]", NAMELESS),
        ('{"name": "f", "arguments": [1]}', BAD),
        ('{"name": "f", "arguments": "{"}', INVALID),
        ('{"name": "f", "arguments": {"a": NaN}}', INVALID),
        ('{"name": "f", "arguments": {"a": 1e999}}', INVALID),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', INVALID),
        ('{"name": "f\\udfff", "arguments": [1]}', INVALID),
        ("<name>f</name><arguments>{</arguments>", AttemptStatus.XML),
        ("", INVALID),
        ("[" * 100_000, INVALID),
        ('{"name": "f", "arguments": ' + '{"a":' * 600 + "1" + "}" * 601, INVALID),
    ],
)
def test_a_call_that_is_json(raw: str, status: AttemptStatus) -> None:
    (attempt,) = called("qwen3", [raw])
    assert attempt.raw == raw
    check(attempt, status)


@pytest.mark.parametrize(
    ("raw", "status", "arguments"),
    [
        ("\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n", OK, {"a": "1"}),
        ("<function=f></function>", OK, {}),
        ("<function=f>", OK, {}),
        ("<function=f><parameter=a>x<b>\n\n</parameter></function>", OK, {"a": "x<b>\n"}),
        ("<function=f>\n<parameter=a>\n1\n</function>", INVALID, None),
        ("<function=f>\nhm\n</function>", INVALID, None),
        ("<function=>\n</function>", NAMELESS, None),
        ('{"name": "f"}', NAMELESS, None),
    ],
)
def test_a_call_of_function_tags(raw: str, status: AttemptStatus, arguments: dict[str, str] | None) -> None:
    (attempt,) = called("qwen3.5", [raw])
    check(attempt, status)
    assert attempt.arguments == arguments


KEY, KEY_END, VALUE, VALUE_END = map(Marker, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))


@pytest.mark.parametrize(
    ("body", "status", "arguments"),
    [
        (["f\n", KEY, "a", KEY_END, "\n", VALUE, "x", VALUE_END, "\n"], OK, {"a": "x"}),
        (["f", KEY, "a", KEY_END, VALUE, VALUE_END], OK, {"a": ""}),
        (["f", KEY, "a", KEY_END, VALUE, "<arg_value>", VALUE_END], OK, {"a": "<arg_value>"}),
        (["f\n"], OK, {}),
        ([KEY, "a", KEY_END], NAMELESS, None),
        (["f", KEY, "a", KEY_END, "\n"], INVALID, None),
        (["f", VALUE, "a", VALUE_END], INVALID, None),
        (["f", KEY, "a", KEY_END, "hm", VALUE, "x", VALUE_END], INVALID, None),
    ],
)
def test_a_call_of_keys_and_values(
    body: list[Segment], status: AttemptStatus, arguments: dict[str, str] | None
) -> None:
    (attempt,) = called("glm4", body)
    check(attempt, status)
    assert attempt.arguments == arguments


QUOTED = Marker('<|"|>')


@pytest.mark.parametrize(
    ("body", "status", "arguments"),
    [
        (
            ["call:f{a:", QUOTED, 'x "y", b:1\n', QUOTED, ", b:[1,", QUOTED, "z", QUOTED, "],c:{d:true}}"],
            OK,
            {"a": 'x "y", b:1\n', "b": [1, "z"], "c": {"d": True}},
        ),
        (["call:get-it{}"], OK, {}),
        (["call:f{a:-1.5,b_c:null}"], OK, {"a": -1.5, "b_c": None}),
        (["call:f{a:", QUOTED, "x"], UNCLOSED, None),
        (["call:f{a:}"], INVALID, None),
        (["call:{}"], NAMELESS, None),
        (["f{}"], NAMELESS, None),
        ([QUOTED, "call:f{}", QUOTED], NAMELESS, None),
    ],
)
def test_a_call_of_gemma(body: list[Segment], status: AttemptStatus, arguments: dict[str, object] | None) -> None:
    (attempt,) = called("gemma4", body)
    check(attempt, status)
    assert attempt.arguments == arguments


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("[f(a='x', b=-1), server.g()]", [(OK, "f", {"a": "x", "b": -1}), (OK, "server.g", {})]),
        ("[f(a='two\nlines', b=\"it's\")]", [(OK, "f", {"a": "two\nlines", "b": "it's"})]),
        (
            "[f(a={'k': [1, true, null]}, b=True, c=None)]",
            [(OK, "f", {"a": {"k": [1, True, None]}, "b": True, "c": None})],
        ),
        ("f(a=1)", [(OK, "f", {"a": 1})]),
        ("[f(a='\\d+')]", [(OK, "f", {"a": "\\d+"})]),
        ("[f(1)]", [(BAD, "f", None)]),
        ("[f(**x)]", [(BAD, "f", None)]),
        ("[f(a=open('x'))]", [(INVALID, "f", None)]),
        ("[f(a={**b})]", [(INVALID, "f", None)]),
        ("[f(a=1e999)]", [(INVALID, "f", None)]),
        ("[f(a='\\ud800')]", [(INVALID, "f", None)]),
        ("[f(a='x]", [(INVALID, None, None)]),
        ("[]", [(NAMELESS, None, None)]),
        ("['f']", [(NAMELESS, None, None)]),
        ("[f()()]", [(NAMELESS, None, None)]),
        ("-" * 100_000 + "1", [(INVALID, None, None)]),
        ("f(a=" + "1+" * 100_000 + "1)", [(INVALID, None, None)]),
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
        (['{"name": "f", "parameters": {"a'], False, [UNCLOSED], ""),
        (['{"name": "f", "parameters": {"a'], True, [INVALID], ""),
        (['{"name": "f", "parameters": 3}'], True, [BAD], ""),
        (['{"name": "f", "parameters": {"a": "}; {\\"\\\\"}} ok'], True, [OK], "ok"),
        (['{"name": "f", "parameters": {a}} {"name": "g", "parameters": {}}'], True, [INVALID, OK], ""),
        (['{"name": "f"} and {"name": "g"}'], True, [OK], 'and {"name": "g"}'),
        (['{"answer": 5}'], True, [], '{"answer": 5}'),
        (['I say {"name": 1}'], True, [], 'I say {"name": 1}'),
        ([], True, [], ""),
    ],
)
def test_a_turn_of_llama(segments: list[Segment], closed: bool, statuses: list[AttemptStatus], content: str) -> None:
    turn = read("llama3.1", segments, closed=closed)
    assert [attempt.status for attempt in turn.attempts] == statuses and turn.content == content
    for attempt in turn.attempts:
        check(attempt, attempt.status)


START, END, CHANNEL, MESSAGE, CONSTRAIN = map(
    Marker, ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>")
)
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
        (
            [CHANNEL, "commentary", MESSAGE, "Wait.", END, START, "assistant", CHANNEL, "final", MESSAGE, "x"],
            "Wait.\nx",
            0,
        ),
        (["no header", END, CHANNEL, "final", MESSAGE, "x"], "no header\nx", 0),
        ([CHANNEL, "commentary to=assistant", MESSAGE, "{}"], "{}", 0),
        ([CHANNEL, "analysis to=functions.f", MESSAGE, "{}", END, CHANNEL, "final", MESSAGE, "x"], "x", 1),
        (["to=f", MESSAGE, "{}", Marker("<|call|>"), START, "assistant to=g", MESSAGE, "{}"], "", 2),
        ([CHANNEL, "final ", CONSTRAIN, "json", MESSAGE, "a ", MESSAGE, "to=f"], "a <|message|>to=f", 0),
    ],
)
def test_messages_of_harmony(segments: list[Segment], content: str, calls: int) -> None:
    turn = read("gpt-oss", [*ANALYSIS[:-2], *segments])
    assert (turn.content, turn.reasoning) == (content, "hm")
    assert [attempt.status for attempt in turn.attempts] == [OK] * calls


@pytest.mark.parametrize(
    ("segments", "statuses"),
    [
        ([" to=functions.", CHANNEL, "commentary", MESSAGE, "{}"], [NAMELESS]),
        ([" to=functions.f", CHANNEL, "commentary", MESSAGE, "{"], [INVALID]),
        ([" to=functions.f", CHANNEL, "commentary", MESSAGE, "[]"], [BAD]),
        ([" to=functions.f", CHANNEL, "commentary", MESSAGE, ""], [OK]),
        ([*ANALYSIS[:-3], '{"name": "f"} to=functions.f'], []),
        (["no header at all"], []),
        ([MESSAGE, MESSAGE, START, START, END], []),
    ],
)
def test_malformed_turns_of_harmony(segments: list[Segment], statuses: list[AttemptStatus]) -> None:
    turn = read("gpt-oss", segments)
    assert [attempt.status for attempt in turn.attempts] == statuses


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [(OK, {"a": 1})]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [(OK, {"a": 1})]),
        ('{"function": "f", "arguments": {"a": 1}}', [(OK, {"a": 1})]),
        ('[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "parameters": {}}]', [(OK, {"a": 1}), (OK, {})]),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 1}}', [(OK, {"a": 1})]),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}', [(BAD, None)]),
        ('{"name": "f", "a": 1}', [(BAD, None)]),
        ('{"name": "f", "args": {"a": 1}}', [(BAD, None)]),
        ("[5]", [(NAMELESS, None)]),
    ],
)
def test_a_call_never_runs_without_arguments_that_stand_in_it(
    body: str, expected: list[tuple[AttemptStatus, dict[str, int] | None]]
) -> None:
    """`parameters` is what Llama and OpenAI's schemas call them, a list is what SmolLM2's card shows."""
    attempts = called("qwen3", [body])
    assert [(attempt.status, attempt.arguments) for attempt in attempts] == expected
    for attempt in attempts:
        check(attempt, attempt.status)


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
    ("text", "status"),
    [
        ('<function=f>{"a": "x"', UNCLOSED),
        ("<function=f>a: x</function>", INVALID),
        ('{"type": "function", "name": "f", "para', INVALID),
        ('[f("x")]', BAD),
        ('{"name": "f", "parameters": {"a": NaN}}', INVALID),
        ('so\n{"name": "f", "parameters": {"a": NaN}}', INVALID),
    ],
)
def test_what_llama_tried_to_write_in_other_words_is_an_attempt(text: str, status: AttemptStatus) -> None:
    (attempt,) = read("llama3.1", [text]).attempts
    check(attempt, status)


@pytest.mark.parametrize(
    "text",
    [
        'A call is\n{"name": "f", "parameters": {}}\nin this form.',
        'The answer:\n{"total": 3, "items": [1, 2]}',
        "[1, 2, 3]",
        '[{"name": "Ann"}, {"name": "Bob"}]',
        "[see (1)]",
        "Write <function=f> to call it.",
        '{"type": "circle", "radius": 2}',
        "\n{" * 40 + "}" * 40 + " is nothing",
    ],
)
def test_an_answer_of_llama_that_looks_like_a_call_is_an_answer(text: str) -> None:
    turn = read("llama3.1", [text])
    assert turn.attempts == () and turn.content == text


@pytest.mark.parametrize("name", ["qwen3.5", "glm4", "gemma4", "lfm2"])
def test_json_between_the_markers_of_another_form_is_read(name: str) -> None:
    (attempt,) = called(name, ['{"name": "f", "arguments": {"a": 1}}'])
    assert (attempt.status, attempt.name, attempt.arguments) == (OK, "f", {"a": 1})


M_CALL, M_ARGS, M_ID = map(Marker, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([M_CALL, '[{"name": "f", "arguments": {"a": 1}, "id": "abcdefgh1"}]'], [("f", {"a": 1}, "abcdefgh1")]),
        (
            [M_CALL, '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'],
            [("f", {}, None), ("g", {}, None)],
        ),
        ([M_CALL, "f", M_ARGS, '{"a": 1}', M_CALL, "g", M_ARGS, "{}"], [("f", {"a": 1}, None), ("g", {}, None)]),
        ([M_CALL, "f", M_ID, "abcdefgh1", M_ARGS, '{"a": 1}'], [("f", {"a": 1}, "abcdefgh1")]),
        (
            [M_CALL, "f", M_ID, "short", M_ARGS, '{"a": "[ARGS] [TOOL_CALLS]"}'],
            [("f", {"a": "[ARGS] [TOOL_CALLS]"}, None)],
        ),
        (["so ", M_CALL, "f", M_ARGS, " "], [("f", {}, None)]),
    ],
)
def test_calls_of_mistral_in_both_spellings(segments: list[Segment], expected: list[object]) -> None:
    turn = read("mistral", segments)
    assert [(attempt.name, attempt.arguments, attempt.call_id) for attempt in turn.attempts] == expected
    assert turn.content == ("so " if segments[0] == "so " else "")


@pytest.mark.parametrize(
    ("segments", "closed", "status"),
    [
        ([M_CALL, '[{"name": "f", "arguments": {'], False, UNCLOSED),
        ([M_CALL, "f", M_ARGS, '{"a": 1}'], False, UNCLOSED),
        ([M_CALL, "f", M_ARGS, '{"a": '], True, INVALID),
        ([M_CALL, "f [ARGS]{}"], True, INVALID),
        ([M_CALL, '[{"arguments": {}}]'], True, NAMELESS),
        ([M_CALL], True, INVALID),
        ([M_CALL, "[]"], True, NAMELESS),
        ([M_CALL, "f", M_ARGS, "[1]"], True, BAD),
    ],
)
def test_calls_of_mistral_that_cannot_be_read(segments: list[Segment], closed: bool, status: AttemptStatus) -> None:
    (attempt,) = read("mistral", segments, closed=closed).attempts
    check(attempt, status)


D_BEGIN, D_END, D_CALLS, D_CALLS_END, D_SEP = map(
    Marker,
    (
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
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
    ("segments", "status"),
    [
        ([D_BEGIN, "f", D_SEP, "{", D_END], INVALID),
        ([D_BEGIN, "", D_SEP, "{}", D_END], NAMELESS),
        ([D_BEGIN, "f {}", D_END], INVALID),
        ([D_BEGIN, "f", D_SEP, "{}"], UNCLOSED),
        ([D_BEGIN, "f", D_SEP, "[1]", D_END], BAD),
    ],
)
def test_calls_of_deepseek_that_cannot_be_read(segments: list[Segment], status: AttemptStatus) -> None:
    (attempt,) = read("deepseek", [D_CALLS, *segments, D_CALLS_END]).attempts
    check(attempt, status)
