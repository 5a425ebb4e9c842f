"""Every kind of annotation, from the schema over the check to what the function is really given in its worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools import Toolbox, load_tools, run_tool

FILE = Path(__file__).parents[1] / "fixtures" / "tools" / "typed_tools.py"

# tool: (what the model writes, what the function is given, what no model may write)
CASES: dict[str, tuple[Any, str, Any]] = {
    "an_int": (3, "int 3", "three"),
    "a_float": (2, "int 2", "two"),  # as a plain call hands it on; Python takes an int for a float
    "a_bool": ("true", "bool True", "yes"),
    "a_str": ("a", "str 'a'", [1]),
    "a_list": ([1, "2"], "list [1, 2]", [1, "b"]),
    "a_dict": ({"a": 1}, "dict {'a': 1}", {"a": "b"}),
    "a_literal": ("x", "str 'x'", "z"),
    "an_enum": ("blue", "Colour <Colour.BLUE: 'blue'>", "green"),
    "an_optional": (None, "NoneType None", "none at all"),
    "a_union": (["a"], "list ['a']", [1]),
    "a_default": (8, "int 8", "eight"),
    "a_dataclass": ({"x": 1}, "Point Point(x=1, y=0)", {"y": 1}),
    "a_typeddict": ({"loud": True}, "dict {'loud': True}", {"loud": "very"}),
    "a_model": ({"corners": [{"x": 1}]}, "Shape Shape(corners=[Point(x=1, y=0)], colour=<Colour.RED: 'red'>)", {}),
    "a_nested_list": ([{"x": 1, "y": 2}], "list [Point(x=1, y=2)]", [{"x": "left"}]),
    "a_nested_dict": ({"a": ["red"]}, "dict {'a': [<Colour.RED: 'red'>]}", {"a": ["green"]}),
}


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    with load_tools(FILE, workers=1) as box:
        yield box


def test_every_tool_of_the_file_has_a_case(toolbox: Toolbox) -> None:
    assert toolbox.names == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_schema_stands_alone_and_the_function_is_given_the_real_object(toolbox: Toolbox, name: str) -> None:
    parameters = next(s["function"]["parameters"] for s in toolbox.schemas if s["function"]["name"] == name)
    assert "$ref" not in str(parameters)
    jsonschema.Draft202012Validator.check_schema(parameters)
    assert parameters.get("required", []) == ([] if name == "a_default" else ["value"])
    written, given, unfit = CASES[name]
    assert run_tool(toolbox, {"name": name, "arguments": {"value": written}}).content == given
    result = run_tool(toolbox, {"name": name, "arguments": {"value": unfit}})
    assert result.error is ToolErrorKind.BAD_ARGUMENTS and "value" in result.content, result.content


def test_a_key_that_no_field_takes_is_told_as_at_the_top(toolbox: Toolbox) -> None:
    for name, value, said in (
        ("a_dataclass", {"x": 1, "z": 2}, "unknown parameter 'value.z'"),
        ("a_nested_list", [{"x": 1}, {"x": 1, "xx": 2}], "unknown parameter 'value[1].xx', did you mean 'x'?"),
        ("a_typeddict", {"loud": True, "colour": "red"}, "unknown parameter 'value.colour'"),
        ("a_model", {"corners": [{"x": 1, "why": 0}]}, "unknown parameter 'value.corners[0].why'"),
    ):
        result = run_tool(toolbox, {"name": name, "arguments": {"value": value}})
        assert result.error is ToolErrorKind.BAD_ARGUMENTS and said in result.content, result.content


def test_an_example_of_a_list_of_objects_is_one_and_a_default_need_not_be_given(toolbox: Toolbox) -> None:
    said = run_tool(toolbox, {"name": "a_nested_list", "arguments": {"value": 3}}).content
    assert 'must be a list like [{"x": 3}], got 3' in said
    assert run_tool(toolbox, {"name": "a_default"}).content == "int 7"


def test_a_function_of_few_words_is_called_as_it_is_written_and_its_user_warned() -> None:
    """What the model will not see is said; arguments keep their places, and integers inside lists stay integers."""

    def p(a: float, b: int = 1, c: int = 2, /) -> str:
        """Show them."""
        return f"{a} {b} {c}"

    def total(prices: list[float], shares: int = 0) -> str:
        """Add up.

        Args:
            prices: What each costs.
        """
        return f"{prices}"

    with pytest.warns(UserWarning) as caught:
        box = load_tools([p, total], workers=1)
    with box:
        given = ({"a": 2**53 + 1, "c": 9}, {"a": 5.0}, {"a": "5", "b": 6})
        said = [run_tool(box, {"name": "p", "arguments": arguments}).content for arguments in given]
        assert said == [f"{2**53 + 1} 1 9", "5.0 1 2", "5 6 2"]
        assert run_tool(box, {"name": "total", "arguments": {"prices": [1, 2.5]}}).content == "[1, 2.5]"
    (notice,) = box.notices
    assert "p(a, b, c), total(shares)." in notice and notice in [str(one.message) for one in caught]
