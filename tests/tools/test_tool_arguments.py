"""Arguments: coerced only where that loses nothing; complaints that teach."""

from __future__ import annotations

import enum
import time
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.errors import PluginError
from toolgrpo.tools.arguments import ArgumentChecker, example_of
from toolgrpo.tools.bounds import MAX_DEPTH
from toolgrpo.tools.plugin.schema import type_schema
from toolgrpo.tools.toolbox import parse_call


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


KINDS = {
    **{"number": int, "ratio": float, "flag": bool, "text": str, "items": list[int] | None},
    **{"table": dict[str, float] | None, "either": int | str, "unit": Unit},
}
PROPERTIES = {name: type_schema(kind, "here") for name, kind in KINDS.items()}
CHECKER = ArgumentChecker("sample", {"type": "object", "properties": PROPERTIES, "required": ["number"]})


# parameter: what a model writes, and what the tool is given
COERCED: dict[str, list[tuple[Any, Any]]] = {
    "number": [("3", 3), (" -3 ", -3), (3.0, 3)],
    "ratio": [("2.5", 2.5), ("1e3", 1000.0), ("20", 20), (2, 2)],
    "flag": [("true", True), ("False", False)],
    "text": [(7, "7")],
    "items": [("[1, 2]", [1, 2]), (["1", 2.0], [1, 2]), (None, None), ("null", None)],
    "table": [('{"a": 1}', {"a": 1}), ({"a": "1.5"}, {"a": 1.5})],
    "either": [("3", "3"), (3, 3)],
    "unit": [("celsius", "celsius")],
}


@pytest.mark.parametrize("name", COERCED)
def test_coerces_what_loses_nothing(name: str) -> None:
    for value, becomes in COERCED[name]:
        checked = CHECKER.check({"number": 1, name: value})
        assert checked.complaint is None and checked.arguments[name] == becomes
        assert type(checked.arguments[name]) is type(becomes)


@pytest.mark.parametrize(
    ("schema", "value", "becomes"),
    [
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [True, None]}, "null", None),
        ({"const": 3}, "3", 3),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"anyOf": [{"const": 0.5}, {"type": "null"}]}, "0.5", 0.5),
    ],
)
def test_values_of_an_enum_say_its_type(schema: Any, value: str, becomes: Any) -> None:
    """Schemas of servers often name values alone, and some families write every value as text."""
    checked = ArgumentChecker("sample", {"type": "object", "properties": {"a": schema}}).check({"a": value})
    assert checked.complaint is None and checked.arguments == {"a": becomes}


# parameter: what a model writes, and what it is told
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "number": [
        ("abc", "parameter 'number' must be an integer like 3, got \"abc\""),
        *((3.5, "like 3, got 3.5"), ("3.0", 'got "3.0"'), (True, "got true"), (None, "got null")),
    ],
    "ratio": [("nan", 'must be a number like 2.5, got "nan"'), ("1,000", "a number"), ("9" * 500, "a number")],
    "flag": [(1, "must be true or false, got 1"), ("yes", "must be true or false")],
    "text": [(1.5, "must be a string, got 1.5"), (["a"], 'must be a string, got ["a"]')],
    "items": [([1, "b"], "parameter 'items[1]' must be an integer like 3, got \"b\"")],
    "table": [({"k": "x"}, "parameter 'table.k' must be a number like 2.5")],
    "unit": [("kelvin", 'parameter \'unit\' must be one of "celsius", "fahrenheit"; got "kelvin"')],
    "numbr": [(1, "unknown parameter 'numbr', did you mean 'number'?")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_complains_about_the_rest(name: str) -> None:
    for value, says in REFUSED[name]:
        complaint = CHECKER.check({"number": 1, name: value}).complaint or ""
        assert says in complaint and complaint.startswith("sample: ") and len(complaint) < 600


def test_says_what_is_missing_and_how_to_call() -> None:
    complaint = CHECKER.check({}).complaint or ""
    assert "missing parameter 'number'" in complaint
    assert "Usage: sample(number: integer, ratio: number (optional), " in complaint
    many = CHECKER.check({f"wrong{i}": 1 for i in range(50)}).complaint or ""
    assert "and 48 more" in many and len(many) < 800


def test_nothing_is_guessed_inside_a_list_that_may_be_of_several_kinds() -> None:
    lists = [{"type": "array", "items": {"type": kind}} for kind in ("integer", "string")]
    assert checker({"x": {"anyOf": lists}}).check({"x": ["1"]}).arguments == {"x": ["1"]}
    assert checker({"x": {"anyOf": [lists[0], {"type": "null"}]}}).check({"x": ["1"]}).arguments == {"x": [1]}


def test_an_object_of_any_keys_is_open_and_an_example_of_none_is_empty() -> None:
    either: tuple[Any, ...] = (True, {})
    for more in either:
        assert checker({}, additionalProperties=more).check({"anything": [1]}).arguments == {"anything": [1]}
    assert example_of({"type": "object", "properties": {}}) == {}


def nested(depth: int) -> Any:
    return reduce(lambda value, _: [value], range(depth - 1), list[Any]())


def checker(properties: dict[str, Any], **rest: Any) -> ArgumentChecker:
    return ArgumentChecker("f", {"type": "object", "properties": properties, **rest})


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        ({"type": "integer", "multipleOf": 0.5}, 10**3999, "more than 300 digits"),
        ({"type": "integer", "multipleOf": 7}, "9" * 400, "must be an integer"),
        ({"type": "number", "multipleOf": 1e-300}, 10**300 - 1, "must be a multiple of 1e-300, got 9"),
        ({"type": "number"}, float("nan"), "no number in JSON"),
        ({"type": "number", "multipleOf": 2}, float("inf"), "no number in JSON"),
        ({}, nested(MAX_DEPTH), "nested too deeply"),
        ({}, nested(5000), "nested too deeply"),
        ({"type": "array"}, "[" * 5000 + "]" * 5000, "must be a list"),
        ({"type": "array"}, "[" + "9" * 5000 + "]", "must be a list"),
        ({"type": "object"}, '{"a":' * 900 + "1" + "}" * 900, "must be an object"),
        ({"type": "string"}, "\ud800", "half a character"),
        ({"type": "object"}, {"\udfff": 1}, "half a character"),
        ({"type": "array", "uniqueItems": True}, [{}, 1, {}], "there twice"),
        ({"type": "string", "pattern": "^a+$"}, "b" * 9000, "must match the pattern ^a+$, got"),
    ],
)
def test_degenerate_arguments_are_a_complaint(schema: Any, value: Any, says: str) -> None:
    complaint = checker({"x": schema}).check({"x": value}).complaint or ""
    assert says in complaint and len(complaint) < 900


def test_equal_items_are_found_as_json_compares_them() -> None:
    unique = checker({"x": {"type": "array", "uniqueItems": True}})
    assert unique.check({"x": [1, True, 0, False, "1", [1], [True], {"a": 1}, {"a": True}]}).complaint is None
    assert unique.check({"x": [{"a": 1, "b": 2}, {"b": 2.0, "a": 1.0}]}).complaint is not None


def test_a_pattern_that_never_ends_is_stopped() -> None:
    began = time.thread_time()
    evil = checker({"x": {"type": "string", "pattern": r"^(\w|\w\w)*$"}})
    assert "too long to check" in (evil.check({"x": "a" * 60 + "!"}).complaint or "")
    keys = checker({}, patternProperties={r"^(\w|\w\w)*$": {}}, additionalProperties=False)
    assert "too long to check" in (keys.check({"a" * 60 + "!": 1}).complaint or "")
    assert evil.check({"x": "honest"}).arguments == {"x": "honest"}
    assert time.thread_time() - began < 10


def test_alternatives_that_multiply_are_stopped() -> None:
    levels = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    check = checker({"x": {"$ref": "#/$defs/d0"}}, **{"$defs": {**levels, "d30": {"type": "integer"}}})
    began = time.thread_time()
    assert "too long to check" in (check.check({"x": "text"}).complaint or "")
    assert time.thread_time() - began < 10


def test_what_a_reference_leads_to_is_coerced_and_complained_about_by_its_type() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/a~1point"}}}
    optional = {"anyOf": [{"$ref": "#/$defs/a~1point"}, {"type": "null"}]}
    check = checker({"at": {"$ref": "#/$defs/a~1point"}, "to": optional}, **{"$defs": {"a/point": point}})
    assert check.check({"at": '{"x": "3"}', "to": {"next": {"x": "4"}}}).arguments == {
        "at": {"x": 3},
        "to": {"next": {"x": 4}},
    }
    assert "parameter 'to' must be an object or null, got 5" in (check.check({"to": 5}).complaint or "")
    assert "parameter 'to.next.x' must be an integer" in (check.check({"to": {"next": {"x": "y"}}}).complaint or "")


def deep_schema(depth: int) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": "integer"}
    return reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(depth), leaf)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}, "refers to 'http://127.0.0.1:9/schema.json'"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "Nothing is fetched from elsewhere"),
        ({"$id": "http://127.0.0.1:9/a.json", "properties": {"a": {"$ref": "b.json"}}}, "Nothing is fetched from elsewhere"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "which is not in the schema"),
        ({"properties": {"a": {"$dynamicRef": "#none"}}}, "which is not in the schema"),
        ({"properties": {"a": {"title": "t", "items": {"$ref": "#/properties/a/title"}}}}, "which is not a schema"),
        ({"$ref": "#"}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "refers to itself"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}}, "$defs": {"b": {"not": {"$ref": "#/properties/a"}}}}, "refers to itself"),
        ({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(500)} | {"d500": {}}, "$ref": "#/$defs/d0"}, "at one place"),
        ({"properties": {"a": {"pattern": "("}}}, "the pattern '(' of its schema cannot be read"),
        ({"patternProperties": {"[": {}}}, "cannot be read"),
        ({"properties": {"a": {"pattern": "(" * 50_000}}}, "cannot be read"),
        ({"properties": {"a": {"type": "foo"}}}, "its schema is not valid at '/properties/a/type'"),
        ({"properties": []}, "must describe an object"),
        ({"type": "string"}, "must describe an object"),
        ({"properties": {"a": {"enum": [object()]}}}, "is not plain JSON"),
        ({"properties": {"a": {"description": "x" * 1_000_000}}}, "every prompt would hold them"),
        (deep_schema(40), "nested too deeply"),
        (deep_schema(10_000), "nested too deeply"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_used_is_refused_when_it_is_loaded(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(PluginError, match=r"^the MCP server 's': the tool 'f': ") as caught:
        ArgumentChecker("f", schema, "the MCP server 's': the tool 'f'")
    assert says in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": True, "b": {"anyOf": [True, {"type": "integer"}]}, "c": {"items": False}}},
        {"properties": {"a": {"anyOf": [False, {"type": "integer"}]}}},
        {"properties": {"a": {"type": "array", "items": [{"type": "integer"}]}}, "definitions": {"x": {}}},  # draft 7
        {"properties": {"a": {"pattern": r"^\p{L}+$"}, "nullable": {"type": "integer"}}},
        {"properties": {"a": {"$ref": "#/$defs/nullable"}}, "$defs": {"nullable": {"nullable": True}}},
        {"$id": "https://example.com/s.json", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}},
        {"properties": {"a": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}},
    ],
)
def test_odd_schemas_that_are_legal_can_be_used(schema: dict[str, Any]) -> None:
    check = ArgumentChecker("f", schema)
    values: list[Any] = [1, "x", None, [1], {"a": {}}, [], True]
    for value in values:
        complaint = check.check({"a": value, "b": value}).complaint or ""
        assert len(complaint) < 900 and "cannot be checked" not in complaint


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.text(max_size=20)
    | st.integers()
    | st.sampled_from([10**400, "[[1]]"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(name=st.sampled_from(["none", *KINDS]), value=json_values)
def test_coercion_loses_nothing_and_is_stable(name: str, value: Any) -> None:
    checked = CHECKER.check({"number": 1, name: value})
    if checked.complaint is not None:
        assert checked.arguments == {} and len(checked.complaint) < 1000
        return
    became = checked.arguments[name]
    assert CHECKER.check(checked.arguments) == checked
    if name in ("number", "ratio", "text"):
        assert became == value or float(became) == float(value)


names = st.sampled_from(["a", "b", "nullable", "$ref", ""])
schemas: Any = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["string", "integer", "number", "array", "object", "null", ["integer", "null"], "foo"]
            ),
            "nullable": st.booleans(),
            "pattern": st.sampled_from(["^a*$", "(", r"(\w|\w\w)*!"]),
            "enum": st.lists(json_values, max_size=3),
            "multipleOf": st.sampled_from([2, 0.1, 1e-300, 0, 10**300]),
            "uniqueItems": st.booleans(),
            "$ref": st.sampled_from(
                ["#", "#/$defs/a", "#/properties/b", "#/properties/a/items", "http://127.0.0.1:9/"]
            ),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(names, inner, max_size=3),
            "$defs": st.dictionaries(names, inner, max_size=2),
            "items": inner | st.booleans(),
            "additionalProperties": inner | st.booleans(),
            "anyOf": st.lists(inner | st.booleans(), min_size=1, max_size=3),
            "not": inner,
            "required": st.lists(names, max_size=2, unique=True),
        },
    ),
    max_leaves=8,
)


@given(schema=schemas, value=st.dictionaries(names, json_values, max_size=3))
def test_a_schema_is_refused_with_a_sentence_or_used(schema: Any, value: Any) -> None:
    try:
        check = ArgumentChecker("f", schema, "here")
    except PluginError as error:
        assert str(error).startswith("here: ")
        return
    assert "cannot be checked" not in (check.check(value).complaint or "")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"x": ' + "[" * 500 + "]" * 500 + "}}",
        '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
        {"name": "f", "arguments": '{"x": NaN}'},
        {"name": "f", "arguments": '{"x": ' + "9" * 400 + "}"},
    ],
)
def test_a_call_beyond_the_bounds_is_no_valid_json(call: Any) -> None:
    attempt = parse_call(call)
    assert attempt.status is AttemptStatus.INVALID_JSON and len(attempt.detail or "") < 300


def test_an_object_that_cannot_be_shown_is_a_call_like_any_other() -> None:
    attempt = parse_call({"name": "f", "arguments": {"x": nested(5000)}})
    assert attempt.status is AttemptStatus.OK
    assert "nested too deeply" in (checker({"x": {}}).check(attempt.arguments or {}).complaint or "")


def test_properties_that_alternatives_name_are_taken_and_others_refused() -> None:
    def of(action: str, name: str) -> dict[str, Any]:
        return {"properties": {"action": {"const": action}, name: {"type": "string"}}, "required": [name]}

    by_action = checker({"action": {"type": "string"}}, oneOf=[of("read", "path"), of("find", "word")])
    assert by_action.check({"action": "read", "path": "a"}).complaint is None
    assert by_action.check({"action": "read"}).complaint is not None
    one_of_both = checker({"a": {}, "b": {}}, anyOf=[{"required": ["a"]}, {"required": ["b"]}])
    assert one_of_both.check({"a": 1}).complaint is None
    assert one_of_both.check({"a": 1, "c": 2}).complaint is not None, "nobody names c"


def test_a_price_is_a_multiple_of_a_hundredth() -> None:
    priced = checker({"price": {"type": "number", "multipleOf": 0.01}, "n": {"type": "integer", "multipleOf": 3}})
    assert all(priced.check({"price": price}).complaint is None for price in (19.99, 0.07, 1.1, 3, 1e9))
    assert all(priced.check({"price": price}).complaint is not None for price in (0.075, 12345678.905, 1e-10))
    assert priced.check({"n": 6}).complaint is None and priced.check({"n": 10**30 + 1}).complaint is not None


def test_the_members_of_a_tuple_are_coerced_too() -> None:
    pair = checker({"t": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}})
    assert pair.check({"t": ["1", 2, "3"]}).arguments == {"t": [1, "2", "3"]}
