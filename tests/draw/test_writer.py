"""`toolgrpo init --writer`: a model behind an endpoint words the questions, and no wording asks for something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.draw.test_folder import MATH
from tests.draw.test_wording import call
from tests.support.chat_server import Says, answer, question_of, serving
from toolgrpo.commands.main import main
from toolgrpo.draw import writer
from toolgrpo.draw.writer import fault_of_wording
from toolgrpo.engines.base import KEY_VARIABLE
from toolgrpo.rollout.chat_api import AT_ONCE

OURS = 'Work out the payment: 12000 and "New York", with 5.5 % and roll costs yes.'
PAID = call("f", "F.", {"principal": 12000, "at": "New York", "rate": 5.5, "roll": True}, result="361.2")


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        ("I borrow 12,000 in New York at 5.50%. What do I pay? Roll costs: yes", ""),
        ("Costs are rolled: yes. 12000 and 5.5 it is, in New York.", ""),
        ("", "it is empty"),
        (OURS * 6, "it is too long"),
        ("12000 in New York at 5.5 %, over 3 years, yes", "it has other numbers"),
        ("12000 in New York at 0.055, yes", "it has other numbers"),
        ("12000 in new york at 5.5 %, yes", "a value is missing"),
        ("12000 in New Yorks at 5.5 %, yes", "a value is missing"),
        ("12000 in New York at 5.5 %", "a value is missing"),
        ("12000 in New York at 5.5 %, yes: 361.2", "it has other numbers"),
    ],
)
def test_a_wording_asks_for_the_same(new: str, fault: str) -> None:
    assert fault_of_wording((PAID,), OURS, new) == fault


def test_it_may_leave_out_what_the_call_before_answers_and_not_say_the_answer() -> None:
    first = call("find", "Look up.", {"name": "Anna"}, result="C1")
    then = call("orders_of", "Orders.", {"customer": "C1"}, links={"customer": ""}, result="none yet")
    assert not fault_of_wording((first, then), "Look up Anna, then the orders.", "Which orders has Anna?")
    fault = fault_of_wording((first, then), "Look up Anna, then the orders.", "Anna has none yet?")
    assert fault == "it has the answer"


def rewords(body: dict[str, Any]) -> Says:
    """Reword what adds, lose a value of what divides, refuse what subtracts; the rest it thinks about first."""
    asked = question_of(body)
    if "subtract" in asked.lower():
        return 403, b"not this one"
    if "divide" in asked.lower():
        return answer("Divide something.")
    return answer(f"<think>Hm, 7.</think>\nHey there! {asked}")


def test_rows_are_worded_and_the_others_keep_our_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-1")
    with serving(rewords) as endpoint:
        assert main(["init", "--tools_script", MATH, "--writer", endpoint.url, "--writer_model", "large", "rows"]) == 0
    said = capsys.readouterr().out
    assert set(endpoint.keys) == {"Bearer sk-1"} and {body["model"] for body in endpoint.asked} == {"large"}
    files = [Path(f"rows/{name}.jsonl").read_text() for name in ("train", "heldout")]
    rows = [json.loads(line) for text in files for line in text.splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 200
    worded = [row for row in rows if row["prompt"].startswith("Hey there!")]
    assert f"{len(worded)} of 200 questions are worded by large; {200 - len(worded)} keep our words: " in said
    assert 20 < len(worded) < 180 and "it has other numbers" in said and "not this one" in said
    for row in rows:
        of = {call["name"] for call in json.loads(row["gold_calls"])}
        assert row in worded or (of & {"divide", "subtract"} and "something" not in row["prompt"])


def test_an_endpoint_that_is_lost_later_costs_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "_TIMEOUT_S", 5.0)
    with serving(lambda body: answer("OK") if question_of(body) == "Say OK." else (0, b"")) as endpoint:
        assert main(["init", "--tools_script", MATH, "--writer", endpoint.url, "--writer_model", "large", "rows"]) == 0
    said = capsys.readouterr().out
    assert "0 of 200 questions are worded by large; 200 keep our words: " in said
    assert "the endpoint was given up (" in said and "no reply (" in said
    assert len({str(body) for body in endpoint.asked}) <= 2 * AT_ONCE, "the others are not waited for"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--writer {url}", "--writer URL and --writer_model NAME belong together"),
        ("--writer_model large", "--writer URL and --writer_model NAME belong together"),
        ("--writer 127.0.0.1:8000 --writer_model large", "writer must be an address such as https://HOST/v1"),
        ("--writer {url} --writer_model large", "does not know the model 'large', or --writer is not its address"),
    ],
)
def test_bad_input_is_told_before_a_tool_is_called(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda body: (404, b"unknown")) as endpoint:
        assert main(["init", "--tools_script", MATH, *words.format(url=endpoint.url).split(), "rows"]) == 2
    assert said in capsys.readouterr().err and not Path("rows").exists()
    assert main(["init", "--writer", "http://h/v1", "shop"]) == 2
    assert "--writer applies to tools to draw rows from" in capsys.readouterr().err
