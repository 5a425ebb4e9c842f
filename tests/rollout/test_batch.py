"""The value that everything after a rollout takes."""

from __future__ import annotations

import pytest

from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored


def trajectory(name: str) -> Trajectory:
    return Trajectory(
        prompt_ids=(1,),
        ids=(2,),
        mask=(1,),
        logprobs=(-0.5,),
        messages=({"role": "assistant", "content": name},),
        turns=(),
        stop_reason=StopReason.FINISHED,
    )


def batch(n: int, *, group_size: int = 1, offset: int = 0) -> RolloutBatch:
    episodes = tuple(Scored({"prompt": "q", "i": i}, trajectory(str(i))) for i in range(n))
    return RolloutBatch(episodes=episodes, group_size=group_size, offset=offset)


@pytest.mark.parametrize(
    ("n", "group_size", "offset", "groups"),
    [
        (6, 3, 0, [[0, 1, 2], [3, 4, 5]]),
        (4, 1, 0, [[0], [1], [2], [3]]),
        (4, 3, 4, [[0, 1], [2, 3]]),  # a second process of two with four episodes each
        (2, 4, 2, [[0, 1]]),  # half of a group
        (2, 4, 1, [[0, 1]]),
        (0, 4, 0, []),
    ],
)
def test_groups_are_those_of_the_whole_batch(n: int, group_size: int, offset: int, groups: list[list[int]]) -> None:
    found = batch(n, group_size=group_size, offset=offset).groups()
    assert [[one.row["i"] for one in group] for group in found] == groups


def test_what_is_not_graded_has_no_totals_and_each_episode_needs_a_grade() -> None:
    """What grades become: `learning/test_dropped.py`."""
    with pytest.raises(ValueError, match="not graded yet"):
        _ = batch(2).totals
    with pytest.raises(ValueError, match="argument"):
        batch(2).graded([Grade({}, 1.0)], lambda one: True)


def test_numbers_stand_in_the_metadata() -> None:
    assert [t.metadata["episode"] for t in batch(3).numbered(40).trajectories] == [40, 41, 42]
