from __future__ import annotations

import pytest

from toolgrpo.evaluation.measures import Share, wilson_interval


def test_wilson_interval_against_published_values() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, example
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_share_prints_with_its_interval() -> None:
    assert str(Share.of([1.0] * 228 + [0.0] * 12)) == "0.950 [0.915, 0.971]"
    assert str(Share.of([])) == "0.000 [0.000, 1.000]"
