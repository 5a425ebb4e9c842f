"""Questions in plain words: every value in them, no name with an underscore, other wordings for held-out rows."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests.draw.test_arguments import spec
from toolgrpo.draw.play import PlayedCall
from toolgrpo.draw.wording import alike_tools, noun_of, question, task_of, written


def call(
    name: str, said: str, arguments: dict[str, Any], about: dict[str, str] | None = None, **more: Any
) -> PlayedCall:
    properties = {key: {"description": (about or {}).get(key, "")} for key in arguments}
    return PlayedCall(spec(properties, name, said), arguments, **more)


LOAN = call(
    "loan_payment",
    "Work out the level payment of a loan (see `annual_rate`).",
    {"principal_amount": 12000, "annual_rate": 5.5, "years": 3, "roll_costs": True},
    {"annual_rate": "Rate in percent a year."},
)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_value_is_in_the_question_and_no_name_has_an_underscore(held_out: bool) -> None:
    for seed in range(40):
        said = question([LOAN], random.Random(seed), held_out=held_out)
        assert "12000" in said and "5.5 %" in said and "3 years" in said and "roll costs: yes" in said
        assert "_" not in said and "level payment of a loan" in said and "`" not in said
        assert said[0].isupper() and said[-1] in ".?"


def test_tools_whose_questions_would_be_alike_are_asked_for_by_their_names() -> None:
    there, back = (
        call(name, f"Convert a temperature ({said}).", {"temperature": 20})
        for name, said in (("c_to_f", "Celsius to Fahrenheit"), ("f_to_c", "Fahrenheit to Celsius"))
    )
    alike = alike_tools([there, back, LOAN])
    assert alike == {"c_to_f", "f_to_c"}
    said = [question([one], random.Random(1), held_out=False, alike=alike) for one in (there, back)]
    assert "c to f" in said[0] and "f to c" in said[1]


def test_held_out_rows_are_worded_otherwise() -> None:
    wordings = [
        {re.sub(r"\W.*", "", question([LOAN], random.Random(seed), held_out=held_out)) for seed in range(40)}
        for held_out in (False, True)
    ]
    assert len(wordings[0]) >= 3 and wordings[0].isdisjoint(wordings[1])


def test_a_chain_names_the_result_of_the_call_before_and_not_its_value() -> None:
    first = call("find_customer", "Look up a customer.", {"name": "Anna"}, result='{"customer_id": "C1"}')
    then = call("orders_of", "Orders of a customer.", {"customer_id": "C1"}, links={"customer_id": "customer_id"})
    for seed in range(20):
        said = question([first, then], random.Random(seed), held_out=False)
        assert "the customer id of that result as the customer id" in said and "C1" not in said


@pytest.mark.parametrize(
    ("description", "task"),
    [
        ("Add two integers.", "add two integers"),
        ("Returns the orders of a customer.\n\nMore.", "give me the orders of a customer"),
        ("How many of a part there are.", "tell me how many of a part there are"),
        ("What a division leaves.", "tell me what a division leaves"),
        ("Price of a part", "give me the price of a part"),
        ("Order of a polynomial", "give me the order of a polynomial"),
        ("Weigh pieces of a part.", "weigh pieces of a part"),
        ("Distance between two points; in metres.", "give me the distance between two points"),
        ("URL of a page.", "give me the URL of a page"),
        ("Replaces old by new, at most n times (-1: all).", "replace old by new, at most n times"),
        ("", "give me the lookup part"),
    ],
)
def test_a_docstring_becomes_a_request(description: str, task: str) -> None:
    assert task_of(description, "lookup_part") == task


def test_values_are_written_as_people_write_them() -> None:
    assert written(0.00001) == "0.00001" and written(-3) == "-3" and written([1, 2, 3]) == "1, 2 and 3"
    assert written("Oslo") == "Oslo" and written("New York") == '"New York"' and written(False) == "no"
    assert written([{"unit_price": 5, "on": "2024-01-31"}]) == "(unit price 5, on 2024-01-31)"
    lot = {"type": "object", "properties": {"unit_price": {"description": "In percent."}}}
    assert written([{"unit_price": 5}], {"type": "array", "items": lot}) == "(unit price 5 %)"
    holdings = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert written({"AAPL": 10, "BRK_B": 2, "größe": 1}, holdings) == 'AAPL 10, BRK_B 2, "größe" 1'


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Rate in percent a year.", "0.05 %"),
        ("The discount, in %", "0.05 %"),
        ("annual rate as a decimal (0.05 means 5 percent)", "0.05"),
        ("Interest rate in percent (5 for 5%)", "0.05 %"),
        ("Discount as a fraction, e.g. 0.15 for 15 percent.", "0.05"),
        ("A share, not a percentage: 0.1 is 10 %", "0.05"),
        ("Worth of all; 0 leaves the value at risk in percent.", "0.05"),
        ("The rate; in percent, as the bank says it", "0.05 %"),
    ],
)
def test_percent_stands_behind_what_is_given_in_percent(said: str, shown: str) -> None:
    assert written(0.05, {"description": said}) == shown


def test_a_name_that_says_nothing_gives_way_to_its_description() -> None:
    assert noun_of("a", "The first integer.", by_description=False) == "first integer"
    said = noun_of("annual_rate", "Nominal interest rate in percent a year.", by_description=True)
    assert said == "nominal interest rate a year"
    assert noun_of("kind", "call or put.", by_description=True) == "kind", "what it may be is no name of it"
