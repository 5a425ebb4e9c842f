"""Which turns hold a call without its markers, and which are answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolgrpo.chat.attempts import CallForm, unclosed, unreadable, xml_attempt
from toolgrpo.chat.base import ParsedTurn
from toolgrpo.chat.families import _HERMES_FORM as HERMES
from toolgrpo.chat.families import DEEPSEEK, HARMONY, MISTRAL
from toolgrpo.chat.unmarked import unmarked_call, with_unmarked
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt


def schema(name: str, required: list[str] | None = None, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": required or list(fields)}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": parameters}}


SCHEMAS = [
    schema("calculator", expression="string"),
    schema("search", ["query"], query="string", top_k="integer"),
    schema("now"),
]
CALL = '{"name": "calculator", "arguments": {"expression": "2 + 3"}}'
INDENTED = json.dumps(json.loads(CALL), indent=2)
FORM = HERMES.text
RIGHT = f"<tool_call>\n{CALL}\n</tool_call>"


def found(text: str, *made: CallAttempt) -> CallAttempt | None:
    return unmarked_call(text, SCHEMAS, form=FORM, made=made)


@pytest.mark.parametrize(
    "text",
    [
        *(CALL, f"  {CALL}\n", f"I need the sum {{2 + 3}}.\n{INDENTED}"),
        *(f"```json\n{INDENTED}\n```", f"```\n{CALL}\n```", f"To find the sum, I call.\n\n```json\n{CALL}\n```\n"),
        CALL.replace("arguments", "parameters"),
        json.dumps({"type": "function", "function": json.loads(CALL)}),
    ],
)
def test_one_call_of_an_offered_tool_bare_or_fenced_is_found(text: str) -> None:
    call = found(text)
    assert call is not None and call.status is AttemptStatus.UNMARKED and RIGHT in call.detail
    assert (call.name, call.arguments) == ("calculator", {"expression": "2 + 3"})


@pytest.mark.parametrize(
    "text",
    [
        # something stands behind it, there are two, or it begins no line
        *(f"```json\n{CALL}\n```\nThe result is 5.", f"{CALL}\nThe result is 5.", f"I called {CALL}"),
        *(f"{CALL}\n{CALL}", f"First:\n{CALL}\nThen:\n```json\n{CALL}\n```", f"```json\n{CALL}\n```\n" * 2),
        # no such tool or argument
        *(CALL.replace("calculator", "calculate"), CALL.replace("expression", "sum")),
        CALL.replace('"2 + 3"', "1e999"),
        CALL[:-1] + ', "function": []}',
        '{"name": "calculator"}',
        json.dumps(SCHEMAS[0]["function"]),
        "```python\nprint({'name': 'calculator'})\n```",
        "#### 5",
    ],
)
def test_anything_else_is_an_answer(text: str) -> None:
    assert found(text) is None


def test_a_call_that_was_made_already_is_quoted() -> None:
    made = CallAttempt(AttemptStatus.OK, "", "calculator", {"expression": "2 + 3"})
    text = f"The sum is 5. I found it with\n```json\n{CALL}\n```"
    assert found(text, made) is None and found(text) is not None


@pytest.mark.parametrize(
    "piece", ["{", '{"name": ', "\n{", "```\n", "```\n{", '{"name": "calculator", "arguments": {', "[", "\n "]
)
def test_no_text_takes_long(piece: str) -> None:
    """A pattern that looks at the rest of the text from every place of it would need minutes for these."""
    text = piece * (200_000 // len(piece))
    assert found(text) is None and found(f"{text}\n{CALL} ") in (None, found(CALL))


@pytest.mark.parametrize(
    "broken",
    [
        *(CALL[:-2], CALL + "}", CALL.replace('3"}', '3",}')),
        "{'name': 'calculator', 'arguments': {'expression': '2 + 3'}}",
        "{'name': 'calculator', 'arguments': {'expression': \"2 + 3\", }",
        CALL[:-2] + ",\n",
        f"```json\n{CALL}}}\n```",
    ],
)
def test_an_unreadable_call_is_shown_as_it_was_meant(broken: str) -> None:
    assert unreadable(broken, "it is no JSON", HERMES).detail.endswith(f"it is no JSON; write it as {RIGHT}")


@pytest.mark.parametrize("form", [MISTRAL.call, DEEPSEEK.call, HARMONY.call], ids=["mistral", "deepseek", "gpt-oss"])
def test_forms_with_the_name_apart_show_the_call_that_was_meant(form: CallForm) -> None:
    shown = [unreadable(CALL[:-2], "it is no JSON", form).detail]
    shown.append(getattr(unmarked_call(CALL, SCHEMAS, form=form.text), "detail", ""))
    for detail in shown:
        assert (
            '{"expression": "2 + 3"}' in detail
            and "calculator" in detail
            and "NAME" not in detail
            and "key" not in detail
        )


def test_a_call_that_is_whole_but_not_closed_is_shown_and_one_that_was_cut_is_not() -> None:
    for whole in (CALL, f"\n```json\n{INDENTED}\n```"):
        assert unclosed(whole, HERMES).detail.endswith(RIGHT)
    assert unclosed(CALL[:-2], HERMES).detail == "the call was not closed with </tool_call>"


@pytest.mark.parametrize(
    "broken",  # a stray \m in a program may be a new line, a backslash or nothing
    [
        *("", "{", '{"name": "calculator"', '{"name": calculator, "arguments": {}}', "[" * 20_000),
        *(CALL.replace("2", odd) for odd in ("2\\m", "\\1", "\\x32")),
    ],
)
def test_what_a_call_meant_is_not_guessed(broken: str) -> None:
    assert unreadable(broken, "it is no JSON", HERMES).detail.endswith(f"a call is {FORM}")


def test_dots_and_names_in_arguments_stay_as_they_are() -> None:
    odd = {"name": "{...}", "arguments": {"expression": '"name": ... {...}'}}
    assert json.dumps(odd) in unreadable(json.dumps(odd) + "}", "", HERMES).detail


XML = '\n <name>calculator</name>\n <arguments>{"expression": "2 + 3"}</arguments>\n'


@pytest.mark.parametrize(
    ("raw", "name", "arguments", "shown"),
    [
        (XML, "calculator", {"expression": "2 + 3"}, RIGHT),
        (XML.replace("arguments", "parameters"), "calculator", {"expression": "2 + 3"}, RIGHT),
        (XML.replace("}", ""), "calculator", None, FORM),
        ("<calculator>2 + 3</calculator>", None, None, FORM),
    ],
)
def test_a_call_in_xml_tags_is_named_as_that_and_run_where_other_spellings_are(
    raw: str, name: str | None, arguments: dict[str, str] | None, shown: str
) -> None:
    call = xml_attempt(raw, HERMES)
    assert (call.status, call.name, call.arguments) == (AttemptStatus.XML, name, arguments)
    assert "XML" in call.detail and call.detail.endswith(shown)
    turn = ParsedTurn("", None, (call,), closed=True)
    assert with_unmarked(turn, SCHEMAS, form=FORM) is turn
    (accepted,) = with_unmarked(turn, SCHEMAS, form=None).attempts
    assert accepted.status is (AttemptStatus.XML if arguments is None else AttemptStatus.ACCEPTED)
