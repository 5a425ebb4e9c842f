"""Tools files as they are written elsewhere: one line of docstring, floats, answers in words."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain_tools.py"
    path.write_text(textwrap.dedent(PLAIN))
    return path


@pytest.fixture(scope="module")
def toolbox(file: Path) -> Iterator[Toolbox]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        box = load_tools(file, workers=1)
    with box:
        yield box


def test_a_missing_description_is_a_warning_that_says_what_the_model_will_not_see(file: Path) -> None:
    with pytest.warns(UserWarning) as caught, load_tools(file, workers=1) as box:
        assert box.names == ["calculate_sum", "total"]
        (notice,) = box.notices
    assert "calculate_sum(a, b), total(shares)" in notice
    assert notice in [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (20, 22, "Sum: 42"),
        ("20", "22", "Sum: 42"),
        (20.0, 22, "Sum: 42.0"),
        (2**53 + 1, 0, f"Sum: {2**53 + 1}"),
    ],
)
def test_an_integer_reaches_a_float_as_the_integer_it_was(toolbox: Toolbox, a: object, b: object, says: str) -> None:
    assert run_tool(toolbox, {"name": "calculate_sum", "arguments": {"a": a, "b": b}}).content == says


def test_integers_inside_lists_and_objects_stay_too(toolbox: Toolbox) -> None:
    call = {"name": "total", "arguments": {"prices": [1, 2.5], "shares": {"x": 3}}}
    assert run_tool(toolbox, call).content == "[1, 2.5] {'x': 3} 3.5"
