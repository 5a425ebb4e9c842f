"""Dropped episodes in training: they leave their group and the loss, and too many end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import LossInputs, recorded, run_to_end, same_weights, varied
from toolgrpo import DropEpisode
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.dropped import EnvironmentLost
from toolgrpo.errors import FinalEngineError, InfrastructureError, TooManyDroppedError
from toolgrpo.observe.records import read_episodes
from toolgrpo.testing import ByteChat, ScriptedTools, tiny_trainer
from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e


def lengths(request: SampleRequest, number: int) -> list[int]:
    return ByteChat.say("a" * (1 + number % 4))


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]


def raises(completions: list[Any], **_: Any) -> list[float]:
    if 4 in by_length(completions):
        raise DropEpisode("too long to judge")
    return by_length(completions)


async def returns(completions: list[Any], **_: Any) -> list[Any]:
    return [DropEpisode("too long to judge") if value == 4 else value for value in by_length(completions)]


def says_none(completions: list[Any], **_: Any) -> list[float | None]:
    return [None if value == 4 else value for value in by_length(completions)]


@pytest.mark.parametrize(
    ("rewards", "cause"), [(raises, "reward"), ([by_length, returns], "reward"), (says_none, "no_reward")]
)
def test_a_dropped_episode_leaves_its_group_and_the_loss(
    tmp_path: Path, rewards: Any, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer(tmp_path, rewards, lengths, kind=LossInputs, max_steps=1)
    trainer.train()
    (inputs,) = trainer.seen
    sizes = inputs["completion_mask"].sum(1).tolist()  # a turn's text and its end
    advantages = dict(zip(sizes, inputs["advantages"].tolist(), strict=True))
    n_rewards = len(rewards) if isinstance(rewards, list) else 1
    mean, std = 2.0 * n_rewards, 1.0 * n_rewards  # of 1, 2 and 3
    expected = {size + 1: (size * n_rewards - mean) / (std + 1e-4) for size in (1, 2, 3)} | {5: 0.0}
    assert advantages == pytest.approx(expected)
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
    assert {size: int(n) for size, n in zip(sizes, trained, strict=True)} == {2: 2, 3: 3, 4: 4, 5: 0}
    assert int(inputs["num_items_in_batch"]) == int(trained.sum())
    (log, *_) = trainer.state.log_history
    assert log["dropped/episodes"] == log[f"dropped/{cause}"] == 2 and log["reward/max"] == 3 * n_rewards
    assert log["reward"] == pytest.approx(mean)
    dropped = [record["drop"] for record in read_episodes(trainer.recorder.path) if record["reward_given"] is None]
    assert [drop["cause"] for drop in dropped] == [cause] * 2
    assert "All reward functions returned None" not in caplog.text


def test_too_many_end_the_run_with_their_causes(tmp_path: Path) -> None:
    def reward(completions: list[Any], trajectories: list[Any], **_: Any) -> list[Any]:
        return [t.reward for t in trajectories]

    def lost(row: Any) -> float:
        raise EnvironmentLost("environment Shop: buy: no answer within 3 s")

    tools = ScriptedTools({}, reward=lost)
    trainer = tiny_trainer(tmp_path, reward, lengths, parts={"tools": tools})
    with pytest.raises(TooManyDroppedError, match=r"8 of 8 episodes .* 8 x environment_lost: environment Shop: buy"):
        trainer.train()
    assert trainer.state.global_step == 0 and tools.open_sessions == 0
    records = read_episodes(trainer.recorder.path)
    assert {record["stop_reason"] for record in records} == {"finished"} and len(records) == 8


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            id="in the middle of an optimizer step",
        ),
        pytest.param({"dynamic_sampling": "backfill"}, id="backfill"),
    ],
)
@pytest.mark.parametrize("lost", ["the judge", "the engine"])
def test_a_run_that_the_world_ends_goes_on_from_the_step_before(
    tmp_path: Path, changes: dict[str, Any], lost: str
) -> None:
    """No checkpoint was asked for; the run that is mended becomes the one whose tools never broke."""

    def train(folder: Path, breaks_at: int | None, resume: str | None = None) -> tuple[Any, int]:
        calls: list[int] = []

        def judge(completions: list[Any], trajectories: list[Any], **_: Any) -> list[Any]:
            calls.append(len(completions))
            if len(calls) == breaks_at and lost == "the judge":
                return [DropEpisode("the judge is away")] * len(completions)
            return [float(sum(t.ids) % 3) for t in trajectories]

        def script(request: SampleRequest, number: int) -> list[int]:
            if breaks_at is not None and lost == "the engine" and len(calls) >= breaks_at:
                raise FinalEngineError("the engine is away")
            return varied(request, number)

        trainer = tiny_trainer(
            folder,
            judge,
            script,
            rows=[{"prompt": f"question {number}"} for number in range(9)],
            learning_rate=1e-2,
            max_turn_tokens=12,
            max_steps=6,
            save_strategy="no",
            **changes,
        )
        if breaks_at is None:
            return run_to_end(trainer, resume), len(calls)
        with pytest.raises(InfrastructureError, match=f"{lost} is away"):
            run_to_end(trainer)
        return trainer, len(calls)

    whole, n_calls = train(tmp_path / "whole", None)
    broken, _ = train(tmp_path / "broken", n_calls // 2 + 2)
    assert [one.path.name for one in complete_checkpoints(tmp_path / "broken")] == [
        f"checkpoint-{broken.state.global_step}"
    ]
    assert 0 < broken.state.global_step < 6
    if lost == "the judge":
        assert any(row[3] is None for row in recorded(tmp_path / "broken")), "what was dropped can be looked at"
    resumed, _ = train(tmp_path / "broken", None, resume="auto")
    assert recorded(tmp_path / "broken") == recorded(tmp_path / "whole")
    assert resumed.rollout_batches.n_episodes == whole.rollout_batches.n_episodes
    assert same_weights(resumed, whole)


@pytest.mark.parametrize("who", ["environment_lost", "reward"])
def test_dropped_episodes_of_groups_that_are_drawn_leave_their_group_too(tmp_path: Path, who: str) -> None:
    """Of question 0 one episode is left, so the group is dead and replaced; of the others one is dropped each."""

    asked: dict[str, int] = {}

    def is_dropped(question: str) -> bool:
        asked[question] = asked.get(question, 0) + 1
        return asked[question] <= (3 if question == "0" else 1)

    def lost(row: Any) -> float:
        if is_dropped(row["answer"]):
            raise EnvironmentLost("it died")
        return 0.0

    def reward(completions: list[Any], answer: list[str], trajectories: list[Any], **_: Any) -> list[Any]:
        given: list[Any] = [float(len(t.ids) + place) for place, t in enumerate(trajectories)]
        if who == "environment_lost":
            return given
        return [DropEpisode("unclear") if is_dropped(n) else value for n, value in zip(answer, given, strict=True)]

    tools = ScriptedTools({}, reward=lost) if who == "environment_lost" else None
    trainer = tiny_trainer(
        tmp_path,
        reward,
        lengths,
        kind=LossInputs,
        parts={"tools": tools},
        max_steps=1,
        max_turn_tokens=30,
        dynamic_sampling="backfill",
        shuffle_dataset=False,
        max_dropped_share=0.5,
    )
    run_to_end(trainer)
    (log, *_) = trainer.state.log_history
    assert log["sampling/groups_drawn"] == 3 and log["sampling/live_rate"] == pytest.approx(2 / 3)
    assert log["dropped/episodes"] == log[f"dropped/{who}"] == 3 + 1 + 1
    (inputs,) = trainer.seen
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
    advantages = inputs["advantages"].tolist()
    assert sum(int(n) == 0 for n in trained) == 2 and all(
        (int(n) == 0) == (advantage == 0.0) for n, advantage in zip(trained, advantages, strict=True) if int(n) == 0
    )
    assert sum(advantages) == pytest.approx(0.0, abs=1e-5) and sum(map(bool, advantages)) >= 4
