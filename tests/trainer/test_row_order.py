from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.trainer.row_order import RowOrder


def in_order(n: int) -> Any:
    return lambda epoch: list(range(n))


def shuffled(n: int) -> Any:
    return lambda epoch: random.Random(epoch).sample(range(n), n)


def take(order: RowOrder, n: int) -> list[int]:
    rows = order.plan(n)
    order.used(range(n))
    return rows


def test_passes_follow_each_other_in_their_order() -> None:
    order = RowOrder(3, lambda epoch: [[0, 1, 2], [2, 1, 0]][epoch % 2])
    assert take(order, 2) == [0, 1]
    assert take(order, 2) == [2, 2]
    assert take(order, 3) == [1, 0, 0] and order.state()["epoch"] == 2


def test_what_was_planned_and_not_used_comes_first_the_next_time() -> None:
    order = RowOrder(10, in_order(10))
    assert order.plan(8) == [0, 1, 2, 3, 4, 5, 6, 7]
    order.used([0, 1, 2, 5])  # another process took 5, and this one neither 3 nor 4
    assert order.plan(5) == [3, 4, 6, 7, 8]
    order.used([1])
    assert order.plan(4) == [3, 6, 7, 8]
    order.used([])
    assert order.plan(2) == [3, 6]


@pytest.mark.property
@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.lists(st.booleans(), min_size=9, max_size=9)), max_size=12),
    stop_at=st.integers(0, 12),
)
def test_an_order_that_was_saved_and_restored_goes_on_as_one_that_was_not(
    steps: Sequence[tuple[int, list[bool]]], stop_at: int
) -> None:
    def fresh() -> RowOrder:
        return RowOrder(11, shuffled(11))

    whole, resumed = fresh(), fresh()
    for step, (n, use) in enumerate(steps):
        if step == stop_at:
            state, resumed = resumed.state(), fresh()
            resumed.restore({**state, "rows": {0: [1.0, 2]}})  # earlier versions kept these
        rows = [order.plan(n) for order in (whole, resumed)]
        assert rows[0] == rows[1]
        for order in (whole, resumed):
            order.used([number for number in range(n) if use[number]])
    assert whole.state() == resumed.state()


@pytest.mark.property
@given(uses=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=20))
def test_no_row_is_lost_and_none_comes_twice_in_a_pass(uses: Sequence[Sequence[bool]]) -> None:
    order = RowOrder(200, in_order(200))
    drawn: list[int] = []
    for use in uses:
        rows = order.plan(6)
        order.used(number for number, used in enumerate(use) if used)
        drawn += [row for row, used in zip(rows, use, strict=True) if used]
    assert len(drawn) == len(set(drawn))
    state = order.state()
    assert set(drawn) | set(state["held"]) == set(range(state["position"]))
