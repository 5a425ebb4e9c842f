"""Dropped episodes in training: they leave their group and the loss, and too many end the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import LossInputs, recorded, run_to_end, same_weights, step_logs, varied
from toolgrpo import DropEpisode
from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.dropped import EnvironmentLost
from toolgrpo.errors import EngineError, FinalEngineError, TooManyDroppedError
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
    ("rewards", "cause"), [([raises], "reward"), ([by_length, returns], "reward"), ([says_none], "no_reward")]
)
def test_a_dropped_episode_leaves_its_group_and_the_loss(tmp_path: Path, rewards: Any, cause: str, caplog: Any) -> None:
    trainer = tiny_trainer(tmp_path, rewards, lengths, kind=LossInputs, max_steps=1)
    trainer.train()
    (inputs,) = trainer.seen
    sizes = inputs["completion_mask"].sum(1).tolist()  # a turn's text and its end
    advantages = dict(zip(sizes, inputs["advantages"].tolist(), strict=True))
    n_rewards = len(rewards)
    mean, std = 2.0 * n_rewards, 1.0 * n_rewards  # of 1, 2 and 3
    expected = {size + 1: (size * n_rewards - mean) / (std + 1e-4) for size in (1, 2, 3)} | {5: 0.0}
    assert advantages == pytest.approx(expected)
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
    assert {size: int(n) for size, n in zip(sizes, trained, strict=True)} == {2: 2, 3: 3, 4: 4, 5: 0}
    assert int(inputs["num_items_in_batch"]) == int(trained.sum())
    (log, *_) = trainer.state.log_history
    assert log["dropped/episodes"] == log[f"dropped/{cause}"] == 2 and log["reward/max"] == 3 * n_rewards
    assert log["reward"] == pytest.approx(mean)
    records = read_episodes(trainer.recorder.path)
    assert [record["drop"]["cause"] for record in records if record["reward_given"] is None] == [cause] * 2
    assert "All reward functions returned None" not in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {"dynamic_sampling": "backfill"},
    ],
    ids=["in the middle of an optimizer step", "backfill"],
)
def test_a_run_that_the_world_ends_goes_on_from_the_step_before(tmp_path: Path, changes: dict[str, Any]) -> None:
    """No checkpoint was asked for; the run that is mended becomes the one whose tools never broke."""
    rows = [{"prompt": f"question {number}"} for number in range(9)]
    options = {"learning_rate": 1e-2, "max_turn_tokens": 12, "max_steps": 6, **changes}

    def trainer_of(name: str, calls: list[int], lost: str = "", breaks_at: int = 0) -> Any:
        def judge(completions: list[Any], trajectories: list[Any], **_: Any) -> list[Any]:
            calls.append(len(completions))
            if len(calls) == breaks_at and lost == "the judge":
                return [DropEpisode("the judge is away")] * len(completions)
            return [float(sum(t.ids) % 3) for t in trajectories]

        def script(request: SampleRequest, number: int) -> list[int]:
            if lost == "the engine" and len(calls) >= breaks_at:
                raise FinalEngineError("the engine is away")
            return varied(request, number)

        return tiny_trainer(tmp_path / name, judge, script, rows=rows, **options)

    calls: list[int] = []
    whole = run_to_end(trainer_of("whole", calls))
    for lost, error in (("the judge", TooManyDroppedError), ("the engine", EngineError)):
        broken = trainer_of(lost, [], lost, len(calls) // 2 + 2)
        with pytest.raises(error, match=f"{lost} is away"):
            run_to_end(broken)
        assert [one.step for one in complete_checkpoints(tmp_path / lost)] == [broken.state.global_step]
        assert 0 < broken.state.global_step < 6
        if lost == "the judge":
            state = broken.state
            assert state.num_input_tokens_seen == step_logs(broken)[-1]["num_tokens"], "of the steps that were done"
            assert any(row[3] is None for row in recorded(tmp_path / lost)), "what was dropped can be looked at"
        resumed = run_to_end(trainer_of(lost, []), "auto")
        assert recorded(tmp_path / lost) == recorded(tmp_path / "whole")
        assert resumed.rollout_batches.n_episodes == whole.rollout_batches.n_episodes
        assert same_weights(resumed, whole)


@pytest.mark.parametrize("who", ["environment_lost", "reward"])
def test_dropped_episodes_of_groups_that_are_drawn_leave_their_group_too(tmp_path: Path, who: str) -> None:
    """Of question 0 one episode is left, so the group is dead and replaced; of the others one is dropped each."""
    asked: Counter[str] = Counter()

    def is_dropped(question: str) -> bool:
        asked[question] += 1
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

    tools = ScriptedTools({}, reward=lost)
    parts = {"tools": tools if who == "environment_lost" else None}
    options: dict[str, Any] = {"max_steps": 1, "dynamic_sampling": "backfill", "shuffle_dataset": False}
    options["max_dropped_share"] = 0.5
    trainer = run_to_end(tiny_trainer(tmp_path, reward, lengths, kind=LossInputs, parts=parts, **options))
    assert tools.open_sessions == 0
    (log, *_) = trainer.state.log_history
    assert log["sampling/groups_drawn"] == 3 and log["sampling/live_rate"] == pytest.approx(2 / 3)
    assert log["dropped/episodes"] == log[f"dropped/{who}"] == 3 + 1 + 1
    (inputs,) = trainer.seen
    out = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1) == 0
    advantages = inputs["advantages"]
    assert out.sum() == 2 and not advantages[out].any()
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-5) and advantages.count_nonzero() >= 4
