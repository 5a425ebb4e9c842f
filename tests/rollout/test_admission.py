from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.rollout.group_queue import Admission, Decision

PLAIN = Admission.of(3, max_groups_drawn=4.0)


def test_a_step_begins_with_its_groups_and_replaces_each_dead_one() -> None:
    assert PLAIN.decide([]) == Decision(begin=3)
    assert PLAIN.decide([None, None, None]) == Decision()
    assert PLAIN.decide([None, False, None]) == Decision(begin=1)
    assert PLAIN.decide([None, False, True, None]) == Decision()
    assert PLAIN.decide([True, False, True, True]) == Decision(admitted=(0, 2, 3))


def test_at_the_bound_the_earliest_dead_groups_fill_the_step() -> None:
    bound = Admission.of(2, max_groups_drawn=2.0)
    assert bound.decide([False, False, False, None]) == Decision()
    assert bound.decide([False, False, True, False]) == Decision(admitted=(0, 2))
    assert bound.decide([False] * 4) == Decision(admitted=(0, 1))


@pytest.mark.property
@given(
    live=st.lists(st.booleans(), min_size=32, max_size=32),
    target=st.integers(1, 8),
    factor=st.floats(2.0, 4.0),
    order=st.randoms(use_true_random=False),
)
def test_what_is_admitted_does_not_depend_on_who_ends_first(
    live: list[bool], target: int, factor: float, order: object
) -> None:
    rule = Admission.of(target, max_groups_drawn=factor)

    def play(pick: object) -> tuple[Decision, int]:
        known: list[bool | None] = []
        while (decision := rule.decide(known)).admitted is None:
            known += [None] * decision.begin
            if not decision.begin:
                waiting = [number for number, alive in enumerate(known) if alive is None]
                assert waiting, "it never waits for nothing"
                number = pick(waiting)  # type: ignore[operator]
                known[number] = live[number]
        return decision, len(known)

    decision, drawn = play(order.choice)  # type: ignore[attr-defined]
    assert decision == play(lambda waiting: waiting[0])[0] == play(lambda waiting: waiting[-1])[0]
    assert decision.admitted is not None and len(decision.admitted) == target
    assert list(decision.admitted) == sorted(set(decision.admitted))
    assert drawn <= rule.most == max(target, int(target * factor))
    chosen = [live[number] for number in decision.admitted]
    assert all(chosen) or drawn == rule.most
    assert sum(chosen) == min(target, sum(live[:drawn])), "no live group is left out for a dead one"


def test_a_group_is_waited_for_however_early_later_ones_ended() -> None:
    rule = Admission.of(3, max_groups_drawn=4.0, beyond=3)
    assert rule.decide([None, True, True, True, True, True]) == Decision()
    assert rule.decide([False, True, True, True, True, True, None]) == Decision(admitted=(1, 2, 3)), (
        "dead, and not waited for"
    )


def test_a_dead_group_is_replaced_at_once_at_the_end_of_the_line() -> None:
    rule = Admission.of(3, max_groups_drawn=4.0, beyond=3)
    assert rule.decide([None, False, None, None, None, None]) == Decision(begin=1)


@pytest.mark.property
@given(
    target=st.integers(1, 5),
    staleness=st.integers(0, 2),
    dead=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    backfill=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_in_a_line_nobody_is_overtaken_and_nobody_is_lost(
    target: int, staleness: int, dead: float, backfill: bool, random: Random
) -> None:
    """A whole run, whose groups end in any order."""
    steps, most = 12, 3.0 if backfill else 1.0
    line: list[tuple[int, int]] = []  # the number of a group, and the step that it began in
    live: dict[int, bool | None] = {}
    taken: list[int] = []
    for step in range(steps):
        rule = Admission.of(target, max_groups_drawn=most, beyond=min(staleness, steps - 1 - step) * target)
        while (decision := rule.decide([live[n] for n, _ in line])).admitted is None:
            for _ in range(decision.begin):
                line.append((len(live), step))
                live[len(live)] = None
            if not decision.begin:
                number = random.choice([n for n, _ in line if live[n] is None])
                live[number] = not backfill or random.random() >= dead
        admitted = [line[place] for place in decision.admitted]
        assert len(admitted) == target and all(step - began <= staleness for _, began in admitted)
        taken += [n for n, _ in admitted]
        assert [n for n in taken if live[n]] == sorted(n for n in taken if live[n])
        line = [(n, began) for n, began in line if live[n] is not False and n not in taken]
    assert len(set(taken)) == len(taken) == steps * target
    assert set(taken) | {n for n in live if live[n] is False} == set(live), "every group was trained on, or is dead"
