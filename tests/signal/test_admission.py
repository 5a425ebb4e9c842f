from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.signal.admission import Admission, Decision

PLAIN = Admission.of(3, oversample=1.0, max_groups_drawn=4.0)


def test_a_step_begins_with_its_groups_and_replaces_each_dead_one() -> None:
    assert PLAIN.decide([]) == Decision(draw=3)
    assert PLAIN.decide([None, None, None]) == Decision()
    assert PLAIN.decide([None, False, None]) == Decision(draw=1)
    assert PLAIN.decide([None, False, True, None]) == Decision()
    assert PLAIN.decide([True, False, True, True]) == Decision(admitted=(0, 2, 3), decided=4)


def test_a_group_that_ended_late_is_waited_for_and_not_overtaken() -> None:
    spare = Admission.of(2, oversample=1.5, max_groups_drawn=4.0)
    assert spare.decide([]) == Decision(draw=3)
    assert spare.decide([None, True, True]) == Decision(), "the first may still be live, and then it is admitted"
    assert spare.decide([True, True, None]) == Decision(admitted=(0, 1), decided=2), "nobody waits for the spare one"
    assert spare.decide([False, True, True]) == Decision(admitted=(1, 2), decided=3)


def test_spare_groups_are_used_before_others_are_drawn() -> None:
    spare = Admission.of(2, oversample=2.0, max_groups_drawn=4.0)
    assert spare.decide([False, None, None, None]) == Decision()
    assert spare.decide([False, False, False, None]) == Decision(draw=1)


def test_at_the_bound_the_earliest_dead_groups_fill_the_step() -> None:
    bound = Admission.of(2, oversample=1.0, max_groups_drawn=2.0)
    assert bound.decide([False, False, False, None]) == Decision()
    assert bound.decide([False, False, True, False]) == Decision(admitted=(0, 2), decided=4)
    assert bound.decide([False] * 4) == Decision(admitted=(0, 1), decided=4)


def test_without_backfill_every_group_is_taken_as_it_is() -> None:
    off = Admission.of(2, oversample=1.0, max_groups_drawn=1.0)
    assert off.decide([]) == Decision(draw=2)
    assert off.decide([False, None]) == Decision()
    assert off.decide([False, True]) == Decision(admitted=(0, 1), decided=2)


def test_a_process_without_groups_is_done_at_once() -> None:
    assert Admission.of(0, oversample=1.0, max_groups_drawn=4.0).decide([]) == Decision(admitted=())


@pytest.mark.property
@given(
    live=st.lists(st.booleans(), min_size=32, max_size=32),
    target=st.integers(1, 8),
    oversample=st.floats(1.0, 2.0),
    factor=st.floats(2.0, 4.0),
    order=st.randoms(use_true_random=False),
)
def test_what_is_admitted_does_not_depend_on_who_ends_first(
    live: list[bool], target: int, oversample: float, factor: float, order: object
) -> None:
    rule = Admission.of(target, oversample=oversample, max_groups_drawn=factor)

    def play(pick: object) -> tuple[Decision, int]:
        known: list[bool | None] = []
        while (decision := rule.decide(known)).admitted is None:
            known += [None] * decision.draw
            if not decision.draw:
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
    assert sum(chosen) == min(target, sum(live[: decision.decided])), "no live group is left out for a dead one"
