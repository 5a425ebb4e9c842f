"""A reward may leave an episode unscored; whatever else it does wrong stays an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolgrpo import DropEpisode
from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import RewardError
from toolgrpo.rewards import get_reward
from toolgrpo.rewards.base import Reward, watched
from toolgrpo.rewards.by_task import ByTask

Messages = list[dict[str, str]]


def completions(*texts: str) -> list[Messages]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def length(completions: list[Messages], **_: Any) -> list[float | None]:
    """Refuse to judge what says `refuse`, whoever else is in the batch."""
    for completion in completions:
        if completion[0]["content"] == "refuse":
            raise DropEpisode("the judge refused")
    return [float(len(completion[0]["content"])) for completion in completions]


async def length_async(completions: list[Messages], **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return length(completions)


def in_the_list(completions: list[Messages], **_: Any) -> list[float | DropEpisode]:
    return [
        DropEpisode("the judge refused") if c[0]["content"] == "refuse" else float(len(c[0]["content"]))
        for c in completions
    ]


def trajectory(drop: Drop | None = None) -> Trajectory:
    return Ledger([1]).finish(StopReason.FINISHED, dropped=drop)


@pytest.mark.parametrize("as_reward", [False, True])
@pytest.mark.parametrize("function", [length, length_async, in_the_list])
def test_only_the_episode_that_is_meant_is_dropped(function: Any, as_reward: bool) -> None:
    reward = watched(Reward(function, name="length", source="test") if as_reward else function)
    first, dropped, last = reward(completions=completions("a", "refuse", "abc"))
    assert (first, last) == (1.0, 3.0)
    assert dropped.at(DropCause.REWARD) == Drop(DropCause.REWARD, "the judge refused")


def test_a_reward_is_not_asked_about_what_was_dropped_before() -> None:
    seen: list[Any] = []

    def reward(completions: list[Messages], answer: list[str], **_: Any) -> list[float]:
        seen.append((len(completions), answer))
        return [1.0] * len(completions)

    gone = trajectory(Drop(DropCause.TOOL, "no network"))
    arguments = {"completions": completions("a", "b", "c"), "answer": ["x", "y", "z"]}
    for given in (reward, Reward(reward, name="r", source="test")):
        asker = watched(given)
        assert asker(trajectories=[trajectory(), gone, trajectory()], **arguments) == [1.0, None, 1.0]
        assert asker(trajectories=[gone, gone, gone], **arguments) == [None, None, None]
    assert seen == [(2, ["x", "z"])] * 2


def test_none_is_no_score_and_nan_is_an_error() -> None:
    assert Reward(lambda completions: [0.5, None], "r", "test")(completions=completions("a", "b")) == [0.5, None]
    with pytest.raises(RewardError, match=r"row 0.*DropEpisode"):
        Reward(lambda completions: [float("nan")], "r", "test")(completions=completions("a"))


def test_a_failure_beside_a_drop_stays_an_error() -> None:
    def fails(completions: list[Messages], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise DropEpisode("somebody refused")
        return [1 / 0]

    with pytest.raises(RewardError, match="ZeroDivisionError"):
        Reward(fails, "r", "test")(completions=completions("a", "b"))
    with pytest.raises(RewardError, match="returned 3 rewards for 1 completions"):
        watched(lambda completions, **_: [1, 2, 3] if len(completions) == 1 else length(completions))(
            completions=completions("refuse", "a")
        )


def test_a_drop_in_the_reward_of_one_task_is_one_of_the_mixture() -> None:
    rewards = {"judge": Reward(length, "judge", "test"), "one": Reward(lambda completions: [1.0], "one", "test")}
    logged: dict[str, float] = {}
    first, dropped, last = Reward(ByTask(rewards.__getitem__), "by_task", "built in")(
        completions=completions("x", "refuse", "abc"),
        reward=["one", "judge", "judge"],
        log_metric=logged.__setitem__,
    )
    assert (first, last) == (1.0, 3.0) and isinstance(dropped, DropEpisode)
    assert logged == {"reward_of_task/one": 1.0, "reward_of_task/judge": 3.0}


def test_the_environments_word_is_the_reward_and_one_that_met_the_deadline_is_lost() -> None:
    late = Ledger([1]).finish(StopReason.DEADLINE)
    reward = get_reward("environment")
    (lost, half) = reward(completions=[[], []], trajectories=[late, trajectory_of(0.5)])
    assert half == 0.5 and isinstance(lost, DropEpisode)
    assert lost.at(DropCause.REWARD).cause is DropCause.ENVIRONMENT_LOST
    with pytest.raises(RewardError, match="nothing to give for episode 1"):
        reward(completions=[[], []], trajectories=[trajectory_of(0.5), trajectory()])


def trajectory_of(reward: float) -> Trajectory:
    return Ledger([1]).finish(StopReason.FINISHED, reward=reward)
