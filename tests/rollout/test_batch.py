"""The value that everything after a rollout takes."""

from __future__ import annotations

import pytest

from toolgrpo.rollout.batch import Grade, RolloutBatch, Scored
from toolgrpo.trajectory import StopReason, Trajectory


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


def test_grading_gives_a_new_batch_and_asks_each_episode_for_its_success() -> None:
    before = batch(2)
    grades = [Grade({"accuracy": 1.0, "style": None}, 1.0), Grade({"accuracy": 0.0, "style": 0.5}, 0.25)]
    after = before.graded(grades, lambda one: one.total == 1.0 and one.trajectory.messages[0]["content"] == "0")
    assert after.totals == (1.0, 0.25) and after.successes == (True, False)
    assert after.episodes[1].rewards == {"accuracy": 0.0, "style": 0.5}
    assert after.is_graded and not before.is_graded and after.trajectories == before.trajectories
    with pytest.raises(ValueError, match="not graded yet"):
        _ = before.totals
    with pytest.raises(ValueError, match="argument"):
        before.graded(grades[:1], lambda one: True)


def test_numbers_stand_in_the_metadata() -> None:
    assert [t.metadata["episode"] for t in batch(3).numbered(40).trajectories] == [40, 41, 42]
