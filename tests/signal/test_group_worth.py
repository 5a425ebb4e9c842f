from __future__ import annotations

from math import nan

import pytest

from toolgrpo.signal.advantages import combined_rewards, is_dead


def test_rewards_that_cancel_out_in_the_sum_may_still_teach_when_each_is_normalized() -> None:
    values = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert is_dead(combined_rewards(values, (1.0, 1.0), normalize_first=False))
    assert is_dead(combined_rewards(values, (1.0, 1.0), normalize_first=True)), "equal spreads, opposite signs"
    assert not is_dead(combined_rewards(values, (1.0, 0.5), normalize_first=True))


def test_rounding_is_no_spread_after_normalizing() -> None:
    values = [(0.1 + 0.2,), (0.3,), (0.30000001192,), (nan,)]
    assert is_dead(combined_rewards(values, (1.0,), normalize_first=True))
    assert combined_rewards(values, (1.0,), normalize_first=True)[3] is None


def test_normalized_rewards_are_those_of_trl() -> None:
    (low, high) = combined_rewards([(1.0,), (3.0,)], (2.0,), normalize_first=True)
    assert low == pytest.approx(-2 / (2**0.5 + 1e-4)) and high == pytest.approx(2 / (2**0.5 + 1e-4))
