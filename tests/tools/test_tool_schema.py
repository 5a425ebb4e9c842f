"""Schemas: equal to transformers' for what both know, richer beyond, and errors in the users' words."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, Optional, Union

import jsonschema
import pydantic
import pytest

from toolgrpo.errors import PluginError
from toolgrpo.tools import tool
from toolgrpo.tools.plugin.plugin_file import tools_of
from toolgrpo.tools.plugin.schema import (
    function_schema,
    modern_hint,
    parse_docstring,
    type_schema,
    wrap_explicit_schema,
)


def plain(a: int, b: float, c: str = "x", d: bool = False) -> float:
    """Do something plain.

    It has a second paragraph,
    over two lines.

    Args:
        a: The first.
        b: The second, described
            over two lines.
        c: The third (choices: ["x", "y"])
        d: The fourth.

    Returns:
        A number: not the first.
    """
    return a + b


def containers(a: list[int], b: dict[str, float], c: list[list[str]], d: tuple[int, str]) -> None:
    pass


def unions(a: Optional[int], b: int | str, c: Union[float, str], d: str | None = None) -> None:  # noqa: UP007, UP045
    pass


def literals(a: Literal["x", "y"], b: Literal[1, 2], c: Any, d: Any) -> None:
    pass


containers.__doc__ = unions.__doc__ = literals.__doc__ = "Take.\n\nArgs:\n" + "".join(f"    {a}: It.\n" for a in "abcd")


def nothing() -> str:
    """Take nothing."""
    return ""


@pytest.mark.parametrize("function", [plain, containers, unions, literals, nothing])
def test_equals_what_transformers_makes(function: Any) -> None:
    transformers_utils = pytest.importorskip("transformers.utils")
    theirs = transformers_utils.get_json_schema(function)
    theirs["function"].pop("return", None)  # servers drop it
    assert function_schema(function, function.__name__, "here") == theirs


def test_rest_and_numpy_docstrings_say_the_same_as_google() -> None:
    google = "Add.\n\nArgs:\n    a: First,\n        and more.\n    b: Second.\n\nReturns:\n    The sum."
    numpy = "Add.\n\nParameters\n----------\na : int\n    First,\n    and more.\nb : int, optional\n    Second.\n\nReturns\n-------\nint\n    The sum."
    rest = "Add.\n\n:param a: First,\n    and more.\n:param b: Second.\n:returns: The sum."
    assert parse_docstring(google) == parse_docstring(numpy) == parse_docstring(rest)
    both = numpy.replace("a : int\n    First,\n    and more.\nb : int, optional", "a, b : int")
    assert parse_docstring(both).parameters == {"a": "Second.", "b": "Second."}
    assert parse_docstring(google).description == "Add." and set(parse_docstring(google).parameters) == {"a", "b"}


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (datetime.date, "2024-01-31", 5),
        (Annotated[int, pydantic.Field(ge=1)], 1, 0),
        (set[int], [1, 2], "12"),
        (list, [1, "a"], {}),
    ],
)
def test_rich_types_have_schemas_that_stand_alone(hint: Any, good: Any, bad: Any) -> None:
    schema = type_schema(modern_hint(hint), "here")
    validator = jsonschema.Draft202012Validator(schema)
    assert "$ref" not in str(schema) and validator.is_valid(good) and not validator.is_valid(bad)


def search(query: str = pydantic.Field(description="Words."), k: int = pydantic.Field(5, ge=1)) -> str:
    """Search."""
    return f"{query} {k}"


def test_defaults_in_the_form_of_pydantic_are_described_required_and_filled_in() -> None:
    (tool,) = tools_of([search], "mine.py")
    assert tool.spec.parameters["required"] == ["query"]
    assert tool.spec.parameters["properties"] == {
        "query": {"type": "string", "description": "Words."},
        "k": {"type": "integer", "minimum": 1, "default": 5},
    }
    assert (tool.call({"query": "a"}), tool.call({"query": "a", "k": 2})) == ("a 5", "a 2")


class Titled(pydantic.BaseModel):
    title: str


def where(city: Annotated[str, "The city to look up"], k: Annotated[int, "of the docstring"] = 1) -> str:
    """Look it up.

    Args:
        k: How many.
    """
    return city * k


def test_a_text_beside_a_type_describes_what_the_docstring_does_not() -> None:
    (tool,) = tools_of([where], "mine.py")
    said = [one.get("description") for one in tool.spec.parameters["properties"].values()]
    assert said == ["The city to look up", "How many."]


def test_a_property_called_title_survives() -> None:
    assert "title" in type_schema(Titled, "here")["properties"]


class Tree(pydantic.BaseModel):
    children: list[Tree]


def _recursive(a: Tree) -> int:
    """Do."""
    return 1


def _variadic(*a: int) -> int:
    """Do."""
    return 1


def _bad_choices(a: str) -> int:
    """Do.

    Args:
        a: A. (choices: tea, coffee)
    """
    return 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_recursive, "Tree refers to itself"),
        (_variadic, "'*a: 'int'' has no fixed form"),
        (_bad_choices, "must be a JSON list"),
    ],
)
def test_errors_say_where_and_what_to_do(function: Any, says: str) -> None:
    with pytest.raises(PluginError, match=r"^file\.py:7: tool 'do'") as caught:
        function_schema(function, "do", "file.py:7: tool 'do'")
    assert says in str(caught.value)


def test_an_object_is_described_by_its_call() -> None:
    class Adds:
        """Keeps nothing."""

        def __call__(self, a: int) -> int:
            """Add one.

            Args:
                a: What to add to.
            """
            return a + 1

    described = function_schema(Adds(), "adds", "h")["function"]
    assert described["description"] == "Add one."
    assert described["parameters"]["properties"]["a"]["description"] == "What to add to."


def test_an_explicit_schema_names_what_the_function_takes() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    with pytest.raises(PluginError, match="names a, which the function does not take by name"):
        tools_of([tool(schema=schema)(_variadic)], "here", {})


def test_an_explicit_schema_is_taken_in_each_of_its_forms() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1}}, "required": ["x"]}
    whole = {"type": "function", "function": {"name": "other", "description": "Said.", "parameters": parameters}}
    assert wrap_explicit_schema(parameters, plain, "plain", "h")["function"]["parameters"] == parameters
    assert wrap_explicit_schema(parameters, nothing, "n", "h")["function"]["description"] == "Take nothing."
    assert wrap_explicit_schema(whole, plain, "plain", "h") == whole
    with pytest.raises(PluginError, match="must describe an object"):
        wrap_explicit_schema({"type": "string"}, plain, "plain", "h")
