"""The calls of an episode against those its row names."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.errors import RewardError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.gold_calls import best_total


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def episode(*made: dict[str, Any] | None) -> Trajectory:
    attempts = tuple(
        CallAttempt(AttemptStatus.OK, "", one["name"], one["arguments"])
        if one is not None
        else CallAttempt(AttemptStatus.INVALID_JSON, "{", "add")
        for one in made
    )
    turns = (Turn(0, 1, "", None, attempts),)
    return Trajectory((1,), (2,), (1,), (-0.5,), (), turns, StopReason.FINISHED)


def score(gold: Any, *made: dict[str, Any] | None) -> Any:
    (value,) = get_reward("gold_calls")(completions=[[]], trajectories=[episode(*made)], gold_calls=[gold])
    return value


ADD, MULTIPLY = call("add", a=1, b=2), call("multiply", a=3, b=4)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((ADD, MULTIPLY), 1.0),
        ((MULTIPLY, ADD), 1.0),  # order does not matter
        ((), 0.0),
        ((ADD,), (1 / 2 + 3) / 7),
        ((call("add", a=1, b=9), MULTIPLY), (1 + 2 + 3) / 7),
        ((call("add", a=1), MULTIPLY), (1 + 1.5 + 3) / 7),
        ((ADD, MULTIPLY, ADD), (2 / 3 + 6) / 7),  # a call too many
        ((ADD, MULTIPLY, None), (2 / 3 + 6) / 7),  # one that cannot be read
        ((call("divide", a=1, b=2),), 0.0),
    ],
)
def test_the_formula(made: tuple[Any, ...], expected: float) -> None:
    assert score([ADD, MULTIPLY], *made) == pytest.approx(expected)
    assert score(json.dumps([ADD, MULTIPLY]), *made) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gold", "made", "same"),
    [
        (0.0525, 0.052500000000000005, True),  # as a column of calls comes back from the files that keep rows
        (5, 5.0, True),
        ("5", 5, True),
        (1234567890123456789, 1234567890123456700, False),
        ("1234567890123456789", 1234567890123456789, True),
        (0.0525, 0.05251, False),
        (1, True, False),
    ],
)
def test_numbers_are_equal_however_they_are_written_and_kept(gold: Any, made: Any, same: bool) -> None:
    assert (score([call("npv", rate=gold)], call("npv", rate=made)) == 1.0) == same


def test_what_a_table_fills_nested_objects_with_is_absent() -> None:
    filled = call("find", q="x", filter={"city": "Oslo", "zip": None})
    assert score([filled], call("find", q="x", filter={"city": "Oslo"})) == 1.0


def test_pairs_are_those_that_are_worth_most_not_the_first_that_fit() -> None:
    gold = [call("f", a=1, b=2), call("f", a=1, b=3)]
    made = [call("f", a=1, b=3), call("f", a=9, b=2)]  # greedily, the first gold call takes the first call
    assert score(gold, *made) == pytest.approx((1 + (1 + 1) + (1 + 2)) / 7)


@pytest.mark.parametrize(
    ("made", "gold", "same"),
    [
        (3, "3", True),
        (3.0, 3, True),
        (" Paris ", "paris", True),
        ("a  b", "A b", True),
        ([1, {"x": "2"}], ["1", {"x": 2.0}], True),
        (True, "true", True),
        (True, 1, False),
        (float("nan"), 1, False),
        (10**400, 10**400, True),
        ("1_000", 1000, False),
        ([1], 1, False),
    ],
)
def test_values_are_compared_as_what_they_mean(made: Any, gold: Any, same: bool) -> None:
    assert score([call("f", x=gold)], call("f", x=made)) == (1.0 if same else pytest.approx(2 / 3))


def test_rows_that_want_no_call_or_are_not_scored() -> None:
    assert score([]) == 1.0 and score([], ADD) == 0.0
    assert score(None, ADD) is None
    filled = [{"name": "add", "arguments": {"a": 1, "b": 2, "city": None}}]  # as a table of several tools gives it
    assert score(filled, ADD) == 1.0


@pytest.mark.parametrize(
    "gold", ["nonsense", 5, [5], [{"arguments": {}}], [{"name": 3}], [{"name": "f", "arguments": 3}]]
)
def test_a_row_that_cannot_be_read_is_named(gold: Any) -> None:
    with pytest.raises(RewardError, match=r"gold_calls .*row 0"):
        score(gold, ADD)


def test_a_flood_of_calls_is_scored_in_time() -> None:
    assert score([ADD] * 20, *[ADD] * 5000) < 1


@pytest.mark.property
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_pairing_is_scipys(n: int, m: int, data: st.DataObject) -> None:
    cell = st.floats(0, 5, width=16)
    worth = data.draw(st.lists(st.lists(cell, min_size=m, max_size=m), min_size=n, max_size=n))
    rows, columns = linear_sum_assignment(numpy.array(worth), maximize=True)
    assert best_total(worth) == pytest.approx(float(numpy.array(worth)[rows, columns].sum()))
    if n <= m <= 5:
        every = (sum(worth[i][j] for i, j in enumerate(order)) for order in itertools.permutations(range(m), n))
        assert best_total(worth) == pytest.approx(max(every))
