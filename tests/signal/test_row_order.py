from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.signal.row_order import GroupResult, Pool, Pools, RowHistory, RowOrder

WEIGHTS = {Pool.HARD: 0.2, Pool.NORMAL: 1.0, Pool.EASY: 0.2, Pool.UNSEEN: 1.0}


def in_order(n: int) -> Any:
    return lambda epoch: list(range(n))


def shuffled(n: int) -> Any:
    return lambda epoch: random.Random(epoch).sample(range(n), n)


def take(order: RowOrder, n: int) -> list[int]:
    rows = order.plan(n)
    order.used(range(n))
    return rows


def test_without_weights_passes_follow_each_other_in_their_order() -> None:
    order = RowOrder(3, lambda epoch: [[0, 1, 2], [2, 1, 0]][epoch % 2])
    assert take(order, 2) == [0, 1]
    assert take(order, 2) == [2, 2]
    assert take(order, 3) == [1, 0, 0] and order.epoch == 2


def test_what_was_planned_and_not_used_comes_first_the_next_time() -> None:
    order = RowOrder(10, in_order(10))
    assert order.plan(8) == [0, 1, 2, 3, 4, 5, 6, 7]
    order.used([0, 1, 2, 5])  # another process took 5, and this one neither 3 nor 4
    assert order.plan(5) == [3, 4, 6, 7, 8]
    order.used([1])
    assert order.plan(4) == [3, 6, 7, 8]
    order.used([])
    assert order.plan(2) == [3, 6]


def test_the_latest_mean_decides_the_pool() -> None:
    pools = Pools(0.25, 0.75, WEIGHTS)
    means = {None: Pool.UNSEEN, 0.0: Pool.HARD, 0.25: Pool.HARD, 0.5: Pool.NORMAL, 0.75: Pool.NORMAL, 0.8: Pool.EASY}
    assert {mean: pools.pool(RowHistory(mean)) for mean in means} == means
    order = RowOrder(4, in_order(4), pools=pools)
    order.learn([GroupResult(0, 0.0, False), GroupResult(1, 1.0, True), GroupResult(2, 0.5, False)])
    assert order.sizes() == {"hard": 1, "normal": 1, "easy": 1, "unseen": 1, "retired": 0}
    order.learn([GroupResult(0, 0.5, False), GroupResult(1, None, False)])
    assert order.sizes() == {"hard": 0, "normal": 2, "easy": 1, "unseen": 1, "retired": 0}, (
        "nothing scored changes nothing"
    )


def test_rows_are_drawn_as_often_as_their_pools_weigh() -> None:
    n, passes = 60, 100
    order = RowOrder(n, shuffled(n), seed=3, pools=Pools(0.25, 0.75, WEIGHTS))
    order.learn(GroupResult(row, row % 3 / 2, False) for row in range(n))
    drawn: Counter[int] = Counter()
    while order.epoch < passes:
        drawn.update(row % 3 for row in take(order, 7))
    normal = drawn[1]
    assert normal == pytest.approx(passes * n / 3, rel=0.02), "the heaviest are in every pass"
    for light in (0, 2):
        assert drawn[light] / normal == pytest.approx(0.2, abs=0.03)


def test_a_row_retires_after_so_many_solved_groups_in_a_row_and_returns_when_none_is_left() -> None:
    order = RowOrder(3, in_order(3), pools=Pools(retire_after_solved=2))
    order.learn([GroupResult(0, 1.0, True), GroupResult(1, 1.0, True)])
    order.learn([GroupResult(0, 1.0, True), GroupResult(1, 0.5, False)])
    order.learn([GroupResult(1, 1.0, True)])
    assert order.sizes()["retired"] == 1
    assert take(order, 4) == [1, 2, 1, 2]
    for row in (1, 2, 2):
        order.learn([GroupResult(row, 1.0, True)])
    assert order.sizes()["retired"] == 3
    assert sorted(take(order, 3)) == [0, 1, 2] and order.sizes()["retired"] == 0


def test_rows_that_were_left_out_are_never_drawn() -> None:
    order = RowOrder(4, in_order(4), left_out={0, 2}, histories={0: RowHistory(1.0), 1: RowHistory(1.0)})
    assert take(order, 5) == [1, 3, 1, 3, 1]
    assert sum(order.sizes().values()) == 2
    with pytest.raises(ValueError, match="no row is left"):
        RowOrder(2, in_order(2), left_out={0, 1})


def test_pools_without_weight_do_not_stop_the_training() -> None:
    order = RowOrder(2, in_order(2), pools=Pools(weights={**WEIGHTS, Pool.EASY: 0.0}))
    order.learn([GroupResult(0, 1.0, True), GroupResult(1, 1.0, True)])
    assert take(order, 2) == [0, 1], "nothing else is there"
    order.learn([GroupResult(1, 0.5, False)])
    assert take(order, 3) == [1, 1, 1]


@pytest.mark.property
@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.lists(st.booleans(), min_size=9, max_size=9)), max_size=12),
    stop_at=st.integers(0, 12),
    means=st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=12, max_size=12),
)
def test_an_order_that_was_saved_and_restored_goes_on_as_one_that_was_not(
    steps: Sequence[tuple[int, list[bool]]], stop_at: int, means: Sequence[float | None]
) -> None:
    def fresh() -> RowOrder:
        return RowOrder(11, shuffled(11), seed=1, pools=Pools(0.25, 0.75, WEIGHTS, retire_after_solved=2))

    whole, resumed = fresh(), fresh()
    for step, (n, use) in enumerate(steps):
        if step == stop_at:
            state, resumed = resumed.state(), fresh()
            resumed.restore(state)
        rows = [order.plan(n) for order in (whole, resumed)]
        assert rows[0] == rows[1]
        for order in (whole, resumed):
            order.used([number for number in range(n) if use[number]])
            order.learn(GroupResult(row, means[row], means[row] == 1.0) for row in rows[0])
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
