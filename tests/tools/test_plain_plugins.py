"""Tools files as they are written elsewhere: one line of docstring, floats, answers in words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolgrpo.tools import Toolbox, load_tools, run_tool

PLAIN = '''
def calculate_sum(a: float, b: float) -> str:
    """Add two numbers."""
    return f"Sum: {a + b}"


def total(prices: list[float], shares: dict[str, float] | None = None) -> str:
    """Add up prices.

    Args:
        prices: What each costs.
    """
    return f"{prices} {shares} {sum(prices)}"


TOOL_FUNCTIONS = [calculate_sum, total]
'''


@pytest.fixture(scope="module")
def warned() -> list[str]:
    """What is said while the file is loaded."""
    return []


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory, warned: list[str]) -> Iterator[Toolbox]:
    path = tmp_path_factory.mktemp("plain") / "plain_tools.py"
    path.write_text(PLAIN)
    with pytest.warns(UserWarning) as caught:
        box = load_tools(path, workers=1)
    warned += [str(one.message) for one in caught]
    with box:
        yield box


def test_a_missing_description_is_a_warning_that_says_what_the_model_will_not_see(
    toolbox: Toolbox, warned: list[str]
) -> None:
    assert toolbox.names == ["calculate_sum", "total"]
    (notice,) = toolbox.notices
    assert "calculate_sum(a, b), total(shares)" in notice and notice in warned


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [(20, 22, "Sum: 42"), ("20", "22", "Sum: 42"), (20.0, 22, "Sum: 42.0"), (2**53 + 1, 0, f"Sum: {2**53 + 1}")],
)
def test_an_integer_reaches_a_float_as_the_integer_it_was(toolbox: Toolbox, a: object, b: object, says: str) -> None:
    assert run_tool(toolbox, {"name": "calculate_sum", "arguments": {"a": a, "b": b}}).content == says


def test_integers_inside_lists_and_objects_stay_too(toolbox: Toolbox) -> None:
    call = {"name": "total", "arguments": {"prices": [1, 2.5], "shares": {"x": 3}}}
    assert run_tool(toolbox, call).content == "[1, 2.5] {'x': 3} 3.5"
