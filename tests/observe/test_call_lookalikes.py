"""Turns that look like calls in a form that is not the model's own."""

from __future__ import annotations

import pytest

from tests.support.tool_calls import attempt
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes, lookalike_form

WRITTEN = {
    "markers": '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "fenced_json": 'I will add.\n```json\n{"name": "add", "arguments": {"a": 1}}\n```',
    "json": 'Sure: {"name": "add", "parameters": {"a": 1, "b": 2}}',
    "react": "Thought: add them\nAction: add\nAction Input: 1, 2",
    "python": "result = add(1, 2)",
}


@pytest.mark.parametrize("form", WRITTEN)
def test_each_form_is_told(form: str) -> None:
    assert lookalike_form(WRITTEN[form], ["add"]) == form and form in FORMS


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 3.",
        "3",
        'The object {"name": "Ada"} has a name.',
        "You could add(1, 2) them in your head.",
        "added(1, 2)",
        "```python\nprint(3)\n```",
        "Action: none is needed.",
    ],
)
def test_answers_are_no_calls(text: str) -> None:
    assert lookalike_form(text, ["add"]) is None


def test_a_long_turn_costs_no_more_than_its_beginning() -> None:
    assert lookalike_form('{"name": "' * 200_000 + WRITTEN["markers"], ["add"]) is None


def episode(*turns: tuple[str, tuple[CallAttempt, ...]]) -> Trajectory:
    ledger = Ledger([1])
    for text, attempts in turns:
        ledger.turn(Turn(start=0, end=0, content=text, reasoning=None, attempts=attempts))
    return ledger.finish(StopReason.FINISHED)


def test_turns_that_hold_a_call_are_not_counted() -> None:
    unmarked = CallAttempt(AttemptStatus.UNMARKED, "{}", "add", {})
    found = count_lookalikes(
        [
            episode((WRITTEN["json"], ()), (WRITTEN["json"], (unmarked,)), (WRITTEN["json"], (attempt("add"),))),
            episode((WRITTEN["python"], ()), ("It is 3.", ())),
        ],
        ["add"],
    )
    assert found == {"json": 2, "python": 1}
