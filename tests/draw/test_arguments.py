"""Arguments drawn from schemas, texts, errors and earlier results."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.draw.arguments import Drawer, Seen, outputs
from toolgrpo.draw.hints import bounds_in, listed_in, words_of
from toolgrpo.tools.arguments import ArgumentChecker
from toolgrpo.tools.plugin.tool_spec import ToolSpec


def spec(
    properties: dict[str, Any], name: str = "tool", said: str = "A tool.", defs: Any = (), **more: Any
) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "$defs": dict(defs)}
    function = {"name": name, "description": said, "parameters": parameters}
    return ToolSpec(name=name, schema={"type": "function", "function": function}, **more)


def drawn(one: ToolSpec, n: int = 60, seed: int = 1) -> list[dict[str, Any]]:
    drawer = Drawer(one, Seen(), random.Random(seed))
    return [drawer.draw() for _ in range(n)]


def values(description: str, kind: str = "number", name: str = "q", **more: Any) -> list[Any]:
    return [one[name] for one in drawn(spec({name: {"type": kind, "description": description, **more}}))]


_LEAVES = st.one_of(
    st.tuples(st.sampled_from(("integer", "number")), st.integers(-1000, 1000), st.integers(0, 1000)).map(
        lambda one: {"type": one[0], "minimum": one[1], "maximum": one[1] + one[2]}
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "string"}),
    st.lists(st.text(max_size=5), min_size=1, max_size=4).map(lambda some: {"type": "string", "enum": some}),
    st.just({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 3}),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
            lambda some: {"type": "object", "properties": some, "required": list(some)}
        ),
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(("city", "count", "rate", "when")), _SCHEMAS, min_size=1), st.integers(0, 99))
def test_what_is_drawn_fits_the_schema(properties: dict[str, Any], seed: int) -> None:
    one = spec(properties)
    checker = ArgumentChecker("tool", one.parameters)
    for arguments in drawn(one, 5, seed=seed):
        assert checker.check(arguments).complaint is None, arguments
        assert json.loads(json.dumps(arguments)) == arguments


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("between 1 and 1000", (1, 1000)),
        ("a share in [0, 0.5]", (0, 0.5)),
        ("in percent (0-100)", (0, 100)),
        ("at least 2, at most 9", (2, 9)),
        ("must be positive", (0.01, None)),
        ("must not be negative", (0, None)),
        ("must be over 0 and at most 100", (1, 100)),
        ("how many lines, at most 1000.", (None, 1000)),
        ("the number of lines", (None, None)),
    ],
)
def test_bounds_are_read_in_a_text(text: str, bounds: tuple[float | None, float | None]) -> None:
    assert bounds_in(text) == bounds


def test_numbers_are_of_the_size_and_the_kind_that_their_text_and_schema_mean() -> None:
    for said, low, high in (("Rate in percent a year.", 0.5, 12), ("in [0, 1]", 0, 1), ("The year of it.", 1990, 2025)):
        found = values(said)
        assert low <= min(found) and max(found) <= high and len(set(found)) > 5
    assert all(type(one) is int and one > 3 for one in values("", "integer", exclusiveMinimum=3, maximum=9))
    assert all(isinstance(one, int) or one != int(one) for one in values("Price."))
    for kind, bounds in (
        ("number", {"exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        ("number", {"minimum": 0, "exclusiveMaximum": 1}),
        ("integer", {"multipleOf": 100}),
        ("integer", {"multipleOf": 5, "minimum": 1, "maximum": 100}),
    ):
        one = spec({"q": {"type": kind, **bounds}})
        some = drawn(one)
        assert len({arguments["q"] for arguments in some}) > 5, bounds
        assert not [one for one in map(ArgumentChecker("tool", one.parameters).check, some) if one.complaint], bounds


def test_bounds_that_leave_little_of_the_usual_values_are_used_whole() -> None:
    for least, most in ((100, 299), (90, 400), (-50, 3)):
        found = values("", "integer", minimum=least, maximum=most)
        assert len(set(found)) > 20 and min(found) < least + 60 and max(found) > most - 60


def test_registered_values_win_over_guessing() -> None:
    one = spec({"city": {"type": "string", "enum": ["a", "b"]}}, examples={"city": ["Tromsø"]})
    assert {arguments["city"] for arguments in drawn(one)} == {"Tromsø"}


def test_an_error_that_lists_values_or_a_bound_is_learned_from() -> None:
    one = spec({"algorithm": {"type": "string"}, "size": {"type": "integer"}})
    drawer = Drawer(one, Seen(), random.Random(1))
    for _ in range(20):
        arguments = drawer.draw()
        ok = arguments["algorithm"] in ("md5", "sha1") and arguments["size"] >= 500
        said = f"ValueError: unknown algorithm {arguments['algorithm']!r}; use one of md5, sha1"
        if arguments["algorithm"] in ("md5", "sha1"):
            said = "ValueError: size must be at least 500"
        drawer.learn(arguments, ok, said)
    assert len(drawer.good) > 8


def test_lists_after_a_cue_are_read_with_and_without_quotes() -> None:
    assert listed_in("no data for X; available: Oslo, Cairo, Lima") == ["Oslo", "Cairo", "Lima"]
    assert listed_in("must be one of 'a b', 'c'") == ["a b", "c"]
    assert listed_in("unknown algorithm 'x'; use one of md5, sha1") == ["md5", "sha1"]
    assert listed_in("there is no part 7") == []
    city = spec({"name": {"type": "string"}}, said="Look a city up. Known cities: Oslo, Rome, Lima.")
    assert {"Oslo", "Rome", "Lima"} < {one["name"] for one in drawn(city)}


def test_values_of_earlier_results_fit_a_parameter_by_their_name() -> None:
    seen = Seen()
    seen.add("list_customers", '[{"customer_id": "C1", "name": "Anna"}, {"customer_id": "C2", "name": "Ben"}]')
    assert seen.of("customer_id", str) == ["C1", "C2"] and seen.of("weight", str) == []
    nested = '{"results": [{"id": 5, "name": "x"}, {"id": 7}], "id": 9}'
    assert [value for label, value in outputs(nested) if label == "id"] == [5, 7, 9], "in the order of reading"
    assert list(outputs("7")) == [("", 7)] and list(outputs("a\nb")) == [("", "a"), ("", "b")]
    assert list(outputs("2024-01-05")) == [("", "2024-01-05")] and list(outputs("3 4")) == [("", 3), ("", 4)]


def test_values_in_the_code_are_tried_where_nothing_else_is_answered() -> None:
    one = spec({"part": {"type": "integer"}}, literals=[110110, 110127])
    drawer = Drawer(one, Seen(), random.Random(1))
    for _ in range(60):
        arguments = drawer.draw()
        drawer.learn(arguments, arguments["part"] in (110110, 110127), "ValueError: there is no such part")
    assert {arguments["part"] for arguments in drawer.good} == {110110, 110127}


def test_values_in_the_code_come_in_one_order_in_every_process() -> None:
    code = (
        "from toolgrpo.tools.plugin.plugin_file import literals_of\n"
        "def mode_of(mode): return mode in {'square', 'cube', 'line', 'point', 'circle'}\nprint(literals_of(mode_of))"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True
        )
        assert done.stdout == b"['circle', 'cube', 'line', 'point', 'square']\n", done.stderr


def test_weights_sum_to_one_and_matrices_are_symmetric() -> None:
    parts = {"weight": {"type": "number"}, "name": {"type": "string"}}
    holding = {"type": "object", "properties": parts, "required": ["weight", "name"]}
    rows = {"type": "array", "items": {"type": "number"}}
    matrix = {"type": "array", "items": rows, "description": "The correlation matrix."}
    one = spec({"holdings": {"type": "array", "items": holding, "description": "weights sum to 1"}, "matrix": matrix})
    for arguments in drawn(one):
        assert sum(part["weight"] for part in arguments["holdings"]) == pytest.approx(1)
        rows = arguments["matrix"]
        assert len(rows) == len(arguments["holdings"]) and rows == [list(column) for column in zip(*rows, strict=True)]
        assert all(row[place] == 1 for place, row in enumerate(rows))


@pytest.mark.parametrize(
    ("name", "said", "form"),
    [
        ("on", "The day, as YYYY-MM-DD.", r"20\d\d-\d\d-\d\d"),
        ("time", "24-hour (HH:MM)", r"\d\d:\d\d"),
        ("day", "", r"\d{4}-\d\d-\d\d"),
    ],
)
def test_dates_and_times_are_drawn_in_their_form(name: str, said: str, form: str) -> None:
    assert all(re.fullmatch(form, one) for one in values(said, "string", name))


def test_a_span_of_days_begins_before_it_ends() -> None:
    day = {"type": "string", "format": "date"}
    span = {"type": "object", "properties": {"start": day, "end": day}, "required": ["start", "end"]}
    assert all(one["span"]["start"] <= one["span"]["end"] for one in drawn(spec({"span": span})))
    assert all(one["start"] <= one["end"] for one in drawn(spec({"start": day, "end": day})))


def test_a_schema_that_refers_to_itself_has_an_end() -> None:
    node = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    one = spec({"root": {"$ref": "#/$defs/node"}}, defs={"node": {**node, "required": ["children"]}})
    assert all("children" in arguments["root"] for arguments in drawn(one, 20))


def test_names_are_taken_apart() -> None:
    assert words_of("maxResults_perPage") == ["max", "results", "per", "page"] and words_of("ISIN") == ["isin"]
    assert words_of("x1") == ["x1"] and words_of("address2") == ["address", "2"] and words_of("größe") == ["größe"]
