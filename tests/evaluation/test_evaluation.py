from __future__ import annotations

import pytest

from toolgrpo.evaluation.measures import Share, grade, wilson_interval
from toolgrpo.trajectory import Ledger, StopReason, Trajectory


def test_wilson_interval_against_published_values() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, example
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_share_prints_with_its_interval() -> None:
    assert str(Share.of([1.0] * 228 + [0.0] * 12)) == "0.950 [0.915, 0.971]"
    assert str(Share.of([])) == "0.000 [0.000, 1.000]"


def said(text: str) -> Trajectory:
    ledger = Ledger([1])
    ledger.sampled([2], [-0.5])
    ledger.say({"role": "assistant", "content": text})
    return ledger.finish(StopReason.FINISHED)


def test_grading_gives_rewards_what_training_gives_them() -> None:
    def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    def tokens(completion_ids: list[list[int]], trajectories: list[Trajectory], **_: object) -> list[float]:
        assert [list(t.ids) for t in trajectories] == completion_ids
        return [0.5] * len(completion_ids)

    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "2"}]
    assert grade([said("1"), said("1")], rows, [right, tokens]) == [1.5, 0.5]
    assert grade([said("1"), said("1")], rows, [right, tokens], weights=[1.0, 2.0]) == [2.0, 1.0]
