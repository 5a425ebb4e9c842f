"""Results as text."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.episode.dropped import DropEpisode
from toolgrpo.tools.render import RenderedText, UnrenderableResult, cut, describe_exception, render_result


@dataclass
class Point:
    x: int


class Model(pydantic.BaseModel):
    name: str


class Kind(enum.Enum):
    A = "a"


class Text(str):
    pass


def test_what_a_generator_raises_is_its_tools() -> None:
    def lines() -> Any:
        yield 1
        raise DropEpisode("down")

    with pytest.raises(DropEpisode):
        render_result(lines(), 100)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (Text("subclass"), '"subclass"'),
        (float("nan"), "NaN"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ({1: 2}, '{"1": 2}'),
        ((1, 2), "[1, 2]"),
        (Point(1), '{"x": 1}'),
        (Model(name="n"), '{"name": "n"}'),
        (Kind.A, '"a"'),
        (datetime.date(2024, 1, 31), '"2024-01-31"'),
        (decimal.Decimal("1.10"), '"1.10"'),
        (np.float64(1.5), "1.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"weights": torch.tensor([0.5, 1.0])}, '{"weights": [0.5, 1.0]}'),
        (pd.DataFrame({"price": [1.5]}, index=["ACME"]), "      price\nACME    1.5"),
        ({"prices": pd.Series([1.5], ["ACME"])}, '{"prices": "ACME    1.5"}'),
        ("a\ud800b", "a?b"),
        (["\ud800"], '["?"]'),
    ],
)
def test_text_of(value: Any, text: str) -> None:
    assert render_result(value, 1000).text == text


@pytest.mark.parametrize("value", [object(), lambda: 0, b"\xff", {"k": object()}])
def test_what_has_no_text_form_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(UnrenderableResult, match=f"returned a {type(value).__name__}"):
        render_result(value, 1000)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )
)
def test_every_json_value_has_a_text_that_means_it(value: Any) -> None:
    text = render_result(value, 10**6).text
    assert text == value if isinstance(value, str) else repr(json.loads(text)) == repr(value)


@given(text=st.text(), limit=st.integers(1, 50))
def test_a_cut_keeps_both_ends_and_says_how_much_is_left_out(text: str, limit: int) -> None:
    left_out, half = max(len(text) - limit, 0), limit // 2
    whole = f"{text[: limit - half]}\n[... {left_out} characters left out ...]\n{text[len(text) - half :]}"
    assert cut(text, limit) == RenderedText(whole if left_out else text, left_out)


def test_what_is_cut_again_keeps_one_notice() -> None:
    once = cut("0123456789" * 10, 50)
    assert cut(once.text, 10, once.left_out).text == "01234\n[... 90 characters left out ...]\n56789"
    assert cut("Error: " + once.text, 10, once.left_out).left_out == 97


def test_an_exception_that_cannot_be_read_is_named() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe_exception(Odd()) == "Odd: (its message cannot be read)"
    assert describe_exception(ValueError("x")) == "ValueError: x"
    assert len(describe_exception(ValueError("x" * 10_000))) < 600
