"""Each stage between TRL's scoring and its loss, without a trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolgrpo.drops import Drop, DropCause
from toolgrpo.learning.correction import Correction
from toolgrpo.learning.shaping import EpisodeSize, Member, Shaping
from toolgrpo.learning.stages import (
    LOSS,
    WORTH,
    Facts,
    LearningRule,
    TrainBatch,
    applied,
    correction,
    dead_groups,
    dead_rows,
    denominator,
    drops,
    estimator,
    is_live,
    left_out,
    turn_credit,
)
from toolgrpo.learning.turns import Credit, EpisodeTurns

LOST = Drop(DropCause.TOOL, "no network")


def member(total: float | None) -> Member:
    return Member(total, LOST if total is None else None, EpisodeSize(1, 0, 1, 0), ())


def facts(*totals: float | None, own: slice = slice(0, 2), **changes: Any) -> Facts:
    rule: dict[str, Any] = {
        "shaping": Shaping(),
        "credit": Credit(),
        "correction": Correction(method="off", why="a test"),
        "skips_rows": True,
    }
    rule.update({name: changes.pop(name) for name in list(changes) if name in rule})
    known = {"group_size": 2, "members": [member(one) for one in totals], "own": own, **changes}
    return Facts(rule=LearningRule(**rule), **known)


def batch(**changes: Any) -> TrainBatch:
    return TrainBatch(
        **{
            "advantages": torch.tensor([0.1, 0.2]),
            "mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
            "n_read": torch.tensor([5, 7]),
            "denominator": torch.tensor(5),
            **changes,
        }
    )


def test_without_options_and_drops_the_tensors_of_trl_go_through() -> None:
    before = batch()
    after = applied((*WORTH, *LOSS), before, facts(0.0, 1.0))
    assert after.mask is before.mask and after.advantages.tolist() == before.advantages.tolist()
    assert after.denominator == before.denominator and after.old_logps is None and after.weights is None


def test_nothing_of_a_dropped_episode_is_trained_on_and_each_process_takes_its_own_rows() -> None:
    after = drops(batch(), facts(1.0, 0.0, None, 1.0, own=slice(2, 4)))
    assert after.mask.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_an_estimator_of_ours_replaces_the_advantages_of_trl() -> None:
    after = estimator(batch(), facts(0.0, 1.0, 2.0, 0.0, own=slice(2, 4), shaping=Shaping(advantage="loo")))
    assert after.advantages.tolist() == [2.0, -2.0]


def test_a_dead_group_has_no_advantage_but_where_rewards_are_normalised_one_by_one() -> None:
    assert dead_groups(batch(), facts(1.0, 1.0)).advantages.tolist() == [0.0, 0.0]
    assert dead_rows(facts(1.0, 0.0, 1.0, 1.0, own=slice(2, 4))) == [True, True]
    assert dead_rows(facts(1.0, 1.0, shaping=Shaping(normalize_first=True))) == [False, False]


def test_each_turn_has_its_own_advantage_on_its_own_tokens() -> None:
    turns = [EpisodeTurns(None, (0.0, 1.0)), EpisodeTurns(None, (0.0,))]
    known = facts(0.0, 0.0, turns=turns, spans=[[(0, 1), (2, 3)], [(0, 3)]], credit=Credit(by_turn=True, scale="none"))
    after = turn_credit(batch(), known)
    assert after.of_turns is not None
    (first, second), (other,) = after.of_turns
    assert after.advantages.tolist() == [[first, 0.0, second], [other] * 3] and first > other
    assert "credit/turn_reward" in after.metrics
    assert turn_credit(batch(), facts(0.0, 1.0)).advantages.dim() == 1


OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
FAR = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]])


def test_bypass_takes_the_engine_for_the_old_policy() -> None:
    after = correction(batch(engine_logps=OLD), facts(0.0, 1.0, correction=Correction(method="bypass", why="")))
    assert after.old_logps is OLD


def test_geo_tis_leaves_out_an_episode_that_is_far_away() -> None:
    known = facts(0.0, 1.0, correction=Correction(method="geo_tis", why=""))
    after = correction(batch(old_logps=OLD, engine_logps=FAR, weights=torch.ones(2, 3)), known)
    assert after.weights is not None and after.weights.tolist() == [[1.0] * 3, [0.0] * 3]
    assert after.metrics["sampling/dropped_episodes"] == 0.5 and len(after.weighted) == 2
    assert left_out(after, known).advantages.tolist() == [pytest.approx(0.1), 0.0]


def test_a_row_that_was_not_read_and_has_an_advantage_is_an_error() -> None:
    half = torch.tensor([[-1.0, -1.0, -1.0], [torch.nan] * 3])
    known = facts(0.0, 1.0, unread=torch.tensor([False, True]))
    after = left_out(batch(old_logps=half, advantages=torch.tensor([0.1, 0.0])), known)
    assert after.old_logps is not None and after.old_logps.tolist() == [[-1.0] * 3, [0.0] * 3]
    with pytest.raises(RuntimeError, match="dead_by_rewards_alone"):
        left_out(batch(old_logps=half), known)


def test_the_denominator_counts_the_tokens_of_every_row() -> None:
    half = denominator(batch(advantages=torch.tensor([0.0, 0.2])), facts(0.0, 1.0))
    assert half.denominator == 5
    assert half.metrics == {"signal/rows_skipped": 0.5, "signal/tokens_skipped": pytest.approx(5 / 12)}


def test_a_row_is_live_if_a_token_that_is_trained_has_an_advantage() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert is_live(torch.tensor([0.5, 0.0, 0.5]), mask).tolist() == [True, False, False]
    per_token = torch.tensor([[0.0, 0.0, 0.5], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert is_live(per_token, mask).tolist() == [False, True, False]
