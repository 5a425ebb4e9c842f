from __future__ import annotations

from typing import Any

import pytest

from toolgrpo.errors import ConfigError
from toolgrpo.signal.group_drawing import GroupDrawingOptions
from toolgrpo.signal.row_order import Pool


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic_sampling": "on"}, "dynamic_sampling must be one of off, backfill; got 'on'"),
        ({"curriculum": "hard"}, "curriculum must be one of off, difficulty_pools; got 'hard'"),
        ({"dynamic_sampling": "backfill", "oversample": 2.5}, "oversample must be from 1 to 2 .*, got 2.5"),
        ({"dynamic_sampling": "backfill", "max_groups_drawn": 0.5}, "max_groups_drawn must be at least 1 .*, got 0.5"),
        (
            {"dynamic_sampling": "backfill", "oversample": 2.0, "max_groups_drawn": 1.5},
            "oversample 2 would begin with more groups than max_groups_drawn 1.5 allows",
        ),
        ({"oversample": 1.5}, "oversample draws spare groups for dynamic_sampling backfill, which is off"),
        ({"hard_up_to": 0.8}, "hard_up_to must not be above normal_up_to, got 0.8 and 0.75"),
        ({"easy_weight": -1.0}, "easy_weight must be 0 or a positive number, got -1"),
        ({"hard_weight": float("nan")}, "hard_weight must be 0 or a positive number, got nan"),
        ({"unseen_weight": 0.0}, "unseen_weight 0 would never draw a row"),
        ({"retire_after_solved": 0}, "retire_after_solved must be at least 1, got 0"),
        (
            {"row_weights": "r.json", "row_pass_min": 0.9, "row_pass_max": 0.1},
            "row_pass_min and row_pass_max .* got 0.9",
        ),
        ({"row_weights": "r.json", "row_pass_k": 0}, "row_pass_k must be at least 1, got 0"),
        ({"row_pass_min": 0.1}, "filter rows by a report; name it in row_weights"),
    ],
)
def test_what_cannot_work_is_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupDrawingOptions(**fields).check_group_drawing()


def test_by_default_nothing_is_drawn_here() -> None:
    options = GroupDrawingOptions()
    options.check_group_drawing()
    assert not options.draws_groups
    on = ({"dynamic_sampling": "backfill"}, {"curriculum": "difficulty_pools"}, {"retire_after_solved": 2})
    assert all(GroupDrawingOptions(**fields).draws_groups for fields in (*on, {"row_weights": "report.json"}))


def test_rows_weigh_the_same_without_a_curriculum_or_a_report() -> None:
    assert set(GroupDrawingOptions(dynamic_sampling="backfill").pools().weights.values()) == {1.0}
    weights = {Pool.HARD: 0.2, Pool.NORMAL: 1.0, Pool.EASY: 0.2, Pool.UNSEEN: 1.0}
    assert GroupDrawingOptions(curriculum="difficulty_pools").pools().weights == weights
    assert GroupDrawingOptions(row_weights="report.json").pools().weights == weights


def test_a_step_may_draw_as_many_groups_as_the_fields_say() -> None:
    options = GroupDrawingOptions(dynamic_sampling="backfill", oversample=1.25, max_groups_drawn=2.5)
    rule = options.admission(6)
    assert (rule.target, rule.begin_with, rule.most) == (6, 8, 15)
    off = GroupDrawingOptions(curriculum="difficulty_pools").admission(6)
    assert (off.target, off.begin_with, off.most) == (6, 6, 6), "nothing is replaced"
