"""Arguments: coerced only where that loses nothing; complaints that teach."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from toolgrpo.tools.arguments import ArgumentChecker, names_near, signature_text
from toolgrpo.tools.plugin.schema import function_schema


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


def sample(
    number: int,
    ratio: float = 1.0,
    flag: bool = False,
    text: str = "",
    items: list[int] | None = None,
    table: dict[str, float] | None = None,
    either: int | str = 0,
    unit: Unit = Unit.C,
) -> str:
    """Take one of each.

    Args:
        number: N.
        ratio: R.
        flag: F.
        text: T.
        items: I.
        table: M.
        either: E.
        unit: U.
    """
    return ""


CHECKER = ArgumentChecker("sample", function_schema(sample, "sample", "here")["function"]["parameters"])


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("number", "3", 3),
        ("number", " -3 ", -3),
        ("number", 3.0, 3),
        ("ratio", "2.5", 2.5),
        ("ratio", "1e3", 1000.0),
        ("ratio", 2, 2),
        ("flag", "true", True),
        ("flag", "False", False),
        ("text", 7, "7"),
        ("items", "[1, 2]", [1, 2]),
        ("items", ["1", 2.0], [1, 2]),
        ("items", None, None),
        ("table", '{"a": 1}', {"a": 1}),
        ("table", {"a": "1.5"}, {"a": 1.5}),
        ("either", "3", "3"),
        ("either", 3, 3),
        ("unit", "celsius", "celsius"),
    ],
)
def test_coerces_what_loses_nothing(name: str, value: Any, becomes: Any) -> None:
    checked = CHECKER.check({"number": 1, name: value})
    assert checked.complaint is None
    assert checked.arguments[name] == becomes
    assert type(checked.arguments[name]) is type(becomes)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("number", "abc", "parameter 'number' must be an integer like 3, got \"abc\""),
        ("number", 3.5, "parameter 'number' must be an integer like 3, got 3.5"),
        ("number", "3.0", "must be an integer"),
        ("number", True, "must be an integer like 3, got true"),
        ("number", None, "must be an integer like 3, got null"),
        ("ratio", "nan", 'must be a number like 2.5, got "nan"'),
        ("ratio", "1,000", "must be a number"),
        ("ratio", "9" * 500, "must be a number"),
        ("flag", 1, "must be true or false, got 1"),
        ("flag", "yes", "must be true or false"),
        ("text", 1.5, "must be a string, got 1.5"),
        ("text", ["a"], 'must be a string, got ["a"]'),
        ("items", [1, "b"], "parameter 'items[1]' must be an integer like 3, got \"b\""),
        ("table", {"k": "x"}, "parameter 'table.k' must be a number like 2.5"),
        ("unit", "kelvin", 'parameter \'unit\' must be one of "celsius", "fahrenheit"; got "kelvin"'),
        ("numbr", 1, "unknown parameter 'numbr', did you mean 'number'?"),
    ],
)
def test_complains_about_the_rest(name: str, value: Any, says: str) -> None:
    checked = CHECKER.check({"number": 1, name: value})
    assert checked.complaint is not None
    assert says in checked.complaint
    assert checked.complaint.startswith("sample: ")
    assert len(checked.complaint) < 600


def test_says_what_is_missing_and_how_to_call() -> None:
    complaint = CHECKER.check({}).complaint
    assert complaint is not None
    assert "missing parameter 'number'" in complaint
    assert "Usage: sample(number: integer, ratio: number (optional), " in complaint


def test_many_complaints_are_counted_not_listed() -> None:
    complaint = CHECKER.check({f"wrong{i}": 1 for i in range(50)}).complaint
    assert complaint is not None and "and 48 more" in complaint and len(complaint) < 800


def test_a_huge_value_is_not_repeated() -> None:
    complaint = CHECKER.check({"number": "x" * 100_000}).complaint
    assert complaint is not None and len(complaint) < 600


def test_nearest_names() -> None:
    assert names_near("Search", ["search_web", "search", "add"]).startswith("'search'")
    assert names_near("zzz", ["search", "add"]) == ""


def test_a_schema_without_declared_parameters_that_allows_more_is_open() -> None:
    checker = ArgumentChecker("f", {"type": "object", "properties": {}, "additionalProperties": True})
    assert checker.check({"anything": [1]}).arguments == {"anything": [1]}


def test_usage_shows_choices_and_lists() -> None:
    text = signature_text("f", function_schema(sample, "f", "h")["function"]["parameters"])
    assert 'unit: "celsius" | "fahrenheit" (optional)' in text
    assert "items: array of integer | null (optional)" in text
