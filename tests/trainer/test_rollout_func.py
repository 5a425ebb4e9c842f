"""TRL's own trainer with our episodes: what it trains on, with weights that follow it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import toolgrpo
from toolgrpo.episode.dropped import Drop, DropCause
from toolgrpo.errors import ConfigError
from toolgrpo.models import folder_of
from toolgrpo.rollout import RolloutBatch, Rollouts


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


def trainer(folder: Path, reward: Any, episodes: Any, **changes: Any) -> GRPOTrainer:
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {n} plus 5?"}]} for n in (3, 14)])
    config = GRPOConfig(
        **{
            **{"output_dir": str(folder), "per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2},
            **{"max_completion_length": 64, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "bf16": False},
            **{"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, **changes},
        }
    )
    return GRPOTrainer(folder_of("nano"), reward, config, rows, rollout_func=episodes)


def test_trls_trainer_trains_on_what_the_model_said(tmp_path: Path) -> None:
    heard: list[Any] = []

    def reward(completions: list[Any], trajectories: list[Any], **kwargs: Any) -> list[float]:
        heard.extend(trajectories)
        return [float(place % 2) for place in range(len(completions))]

    with toolgrpo.rollout_func(tools=[add], engine="transformers", max_turns=2) as episodes:
        one = trainer(tmp_path, reward, episodes)
        seen: list[dict[str, Any]] = []
        scored = one._generate_and_score_completions

        def watched(inputs: Any) -> dict[str, Any]:
            seen.append(scored(inputs))
            return seen[-1]

        one._generate_and_score_completions = watched
        one.train()
    assert len(heard) == 8 and any(call.ok for episode in heard for call in episode.calls)
    masks = [[int(x) for x in row] for output in seen for row in output["tool_mask"]]
    for row, episode in zip(masks, heard, strict=True):
        assert row[: len(episode.mask)] == list(episode.mask)
    assert all(0 in episode.mask for episode in heard if episode.calls), "results of calls are not trained on"
    logs = [log for log in one.state.log_history if "loss" in log]
    assert len(logs) == 2 and logs[0]["grad_norm"] > 0


def test_a_second_training_draws_from_the_weights_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with toolgrpo.rollout_func(tools=[add], engine="transformers") as episodes:
        one = trainer(tmp_path, lambda completions, **_: [0.0] * len(completions), episodes, max_steps=1)
        one.train()
        given: list[Any] = []
        assert episodes._rollouts is not None
        monkeypatch.setattr(episodes._rollouts.engine, "load_weights", given.append)
        one.train()
    assert given


def test_an_episode_that_was_dropped_is_no_part_of_its_groups_mean(tmp_path: Path) -> None:
    def reward(trajectories: list[Any], **kwargs: Any) -> list[float]:
        played.extend(trajectories)
        return [1.0, 1.0, 0.0, 0.0]

    played: list[Any] = []
    with toolgrpo.rollout_func(tools=[add], engine="transformers") as episodes:
        one = trainer(tmp_path, reward, episodes, num_generations=4, max_steps=1)
        drawn = Rollouts.run

        def last_is_dropped(rollouts: Any, *given: Any, **more: Any) -> RolloutBatch:
            batch = drawn(rollouts, *given, **more)
            lost = replace(batch.episodes[3].trajectory, dropped=Drop(DropCause.TOOL, "it went away"))
            return replace(batch, episodes=(*batch.episodes[:3], replace(batch.episodes[3], trajectory=lost)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rollouts, "run", last_is_dropped)
            asked = [{"prompt": [{"role": "user", "content": "q"}]} for _ in range(4)]
            output = one._generate_and_score_completions(asked)
    assert [bool(one.dropped) for one in played] == [False, False, False, True]
    assert output["advantages"].tolist() == pytest.approx([0.577, 0.577, -1.155, 0.0], abs=2e-3)


@pytest.mark.parametrize(("context", "says"), [({"max_tokens": 64}, "several sequences"), (None, "use_vllm")])
def test_an_episode_of_several_sequences_and_a_second_engine_are_refused(
    tmp_path: Path, context: Any, says: str
) -> None:
    episodes = toolgrpo.rollout_func(tools=[add], context=context)
    one = trainer(tmp_path, lambda completions, **kwargs: [0.0] * len(completions), episodes)
    one.use_vllm = context is None
    with pytest.raises(ConfigError, match=says):
        episodes([[{"role": "user", "content": "q"}]], one)
