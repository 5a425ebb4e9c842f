"""Time for patterns: what other threads spend is not this turn's."""

from __future__ import annotations

import time

import pytest

from toolgrpo.support.regex_budget import RegexBudget


def test_a_pattern_that_others_ran_out_of_time_is_tried_again() -> None:
    given: list[float] = []

    def look(left_s: float) -> str:
        given.append(left_s)
        if len(given) < 4:
            raise TimeoutError("regex timed out")
        return "found"

    assert RegexBudget(5.0).spend(look) == "found"
    assert given == sorted(given, reverse=True) and 4.0 < given[-1] <= given[0] <= 5.0


def test_what_this_thread_has_worked_is_shared_by_all_looks_and_sleep_is_no_work() -> None:
    def look(left_s: float) -> None:
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        raise TimeoutError("regex timed out")

    allowance = RegexBudget(0.05)
    time.sleep(0.06)
    assert allowance.spend(lambda left_s: left_s) > 0.0
    for last in (look, lambda left_s: None):
        with pytest.raises(TimeoutError, match=r"timed out after 0\.05 s"):
            allowance.spend(last)
