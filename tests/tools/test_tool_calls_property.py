"""Whatever a model writes: one result, no exception, a bounded text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.arguments import ArgumentChecker
from toolgrpo.tools.render import cut, render_result

pytestmark = pytest.mark.property

MATH = Path(__file__).parents[2] / "tools_funcs" / "arithmetic_tools.py"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["add", "divide", "ad", "", "add "]) | st.text()
CALLS = (
    st.text()
    | JSON
    | st.fixed_dictionaries({"name": NAMES, "arguments": JSON})
    | st.fixed_dictionaries(
        {"name": NAMES, "arguments": st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3)}
    )
)


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    with load_tools(MATH, workers=1) as box:
        yield box


@settings(max_examples=200, deadline=None)
@given(call=CALLS, as_text=st.booleans())
def test_run_tool_never_raises(toolbox: Toolbox, call: Any, as_text: bool) -> None:
    result = run_tool(toolbox, json.dumps(call) if as_text else call)
    assert isinstance(result.content, str) and len(result.content) <= 20_100
    result.content.encode("utf-8")  # a tokenizer can read it
    assert result.ok or result.content.startswith("Error: ")


SCHEMA = {
    "type": "object",
    "properties": {
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "s": {"type": "string"},
        "l": {"type": "array", "items": {"type": "integer"}},
    },
}


@given(arguments=st.dictionaries(st.sampled_from(list("ixbsl")), JSON))
def test_coercion_loses_nothing_and_is_stable(arguments: dict[str, Any]) -> None:
    checker = ArgumentChecker("f", SCHEMA)
    checked = checker.check(arguments)
    if checked.complaint is not None:
        assert checked.arguments == {}
        return
    assert checker.check(checked.arguments) == checked or any(v != v for v in checked.arguments.values())
    for name, value in checked.arguments.items():
        given_value = arguments[name]
        if name in "ix" and isinstance(given_value, str):
            assert float(given_value) == float(value)
        elif name == "s" and isinstance(given_value, int):
            assert int(value) == given_value
        elif name in "ix":
            assert value == given_value or math.isnan(value)


@given(text=st.text(), limit=st.integers(1, 50))
def test_a_cut_keeps_both_ends(text: str, limit: int) -> None:
    rendered = cut(text, limit)
    plain = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        assert (rendered.text, rendered.left_out) == (plain, 0)
    else:
        half = limit // 2
        assert rendered.left_out == len(text) - limit
        assert rendered.text.startswith(plain[: limit - half]) and rendered.text.endswith(plain[len(text) - half :])


@given(value=JSON)
def test_every_json_value_has_a_text(value: Any) -> None:
    text = render_result(value, 10**6).text
    if not isinstance(value, str):
        json.loads(text)
