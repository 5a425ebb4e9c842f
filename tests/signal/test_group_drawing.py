from __future__ import annotations

from typing import Any

import pytest

from toolgrpo.errors import ConfigError
from toolgrpo.signal.admission import GroupDrawingOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic_sampling": "on"}, "dynamic_sampling must be one of off, backfill; got 'on'"),
        ({"dynamic_sampling": "backfill", "max_groups_drawn": 0.5}, "max_groups_drawn must be at least 1 .*, got 0.5"),
    ],
)
def test_what_cannot_work_is_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupDrawingOptions(**fields).check_group_drawing()


def test_by_default_nothing_is_drawn_here() -> None:
    options = GroupDrawingOptions()
    options.check_group_drawing()
    assert not options.draws_groups
    assert GroupDrawingOptions(dynamic_sampling="backfill").draws_groups


def test_a_step_may_draw_as_many_groups_as_the_fields_say() -> None:
    options = GroupDrawingOptions(dynamic_sampling="backfill", max_groups_drawn=2.5)
    rule = options.admission(6)
    assert (rule.target, rule.most) == (6, 15)
    off = GroupDrawingOptions().admission(6)
    assert (off.target, off.most) == (6, 6), "nothing is replaced"
