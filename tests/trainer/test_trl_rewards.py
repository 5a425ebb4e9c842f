"""What `trainer/trl/calls.py` relies on in TRL about rewards, and shaped rewards in a training."""

from __future__ import annotations

from copy import deepcopy
from inspect import getsource as source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support.chat_families import trl_tokenizer
from tests.support.trainings import LossInputs, run_to_end, stage_file
from toolgrpo.engines.base import SampleRequest
from toolgrpo.engines.policy import Backend
from toolgrpo.errors import ConfigError
from toolgrpo.learning.advantages import grouped_advantages
from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.trainer.trl.calls import check_models

pytestmark = pytest.mark.contract


def test_a_row_of_nan_still_leaves_mean_standard_deviation_and_advantage() -> None:
    text = source(GRPOTrainer._generate_and_score_completions)
    for line in (
        "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)",
        "rewards[unscorable_mask] = torch.nan",
        "advantages = torch.nan_to_num(advantages, nan=0.0)",
    ):
        assert line in text, f"TRL no longer says `{line}`; look at CallsOfTRL._calculate_rewards"


def test_a_reward_model_is_still_asked_so() -> None:
    text = source(GRPOTrainer._calculate_rewards)
    for line in (
        'messages = [{"messages": p + c} for p, c in zip(prompts, completions, strict=True)]',
        'apply_chat_template(x, reward_processing_class, **self.chat_template_kwargs)["text"]',
        'text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False',
        "reward_func(**reward_inputs).logits[:, 0]",
    ):
        assert line in text, f"TRL no longer says `{line}`; look at CallsOfTRL._ask_model"
    for name in ("_pending_extra_logs", "_pending_metrics"):
        assert name in source(GRPOTrainer._generate_and_score_completions), "see CallsOfTRL._calculate_rewards"


def test_a_reward_model_that_is_split_cannot_be_asked_by_one_process_alone() -> None:
    def check(*, draws_groups: bool, splits: bool) -> None:
        args: Any = SimpleNamespace(draws_groups=draws_groups)
        check_models([torch.nn.Linear(1, 1)], args, Backend("FSDP", 2, fsdp_version=2 if splits else None))

    check(draws_groups=True, splits=False)
    check(draws_groups=False, splits=True)
    with pytest.raises(ConfigError, match="the reward model is split"):
        check(draws_groups=True, splits=True)


def test_a_reward_model_is_asked_about_no_more_episodes_at_a_time_than_in_training(tmp_path: Path) -> None:
    seen: list[int] = []

    def model(input_ids: torch.Tensor, **_: Any) -> Any:
        seen.append(len(input_ids))
        return SimpleNamespace(logits=torch.ones(len(input_ids), 1))

    tokenizer = deepcopy(trl_tokenizer("qwen3"))
    tokenizer.pad_token = tokenizer.eos_token
    with tiny_trainer(tmp_path, by_length, lengths) as trainer:
        trainer.reward_funcs[0], trainer.reward_processing_classes[0] = model, tokenizer
        asked = [[{"role": "user", "content": "q"}]] * 20, [[{"role": "assistant", "content": "a"}]] * 20
        assert trainer._ask_model(0, *asked) == [1.0] * 20 and seen == [8, 8, 4]


def lengths(request: SampleRequest, number: int) -> list[int]:
    return ByteChat.say("a" * (1 + number % 4))


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[-1]["content"]) > 2) for completion in completions]


@pytest.mark.e2e
@pytest.mark.parametrize("advantage", ["loo", "grpo"])
def test_shaped_rewards_become_the_advantages_that_are_trained_on(tmp_path: Path, advantage: str) -> None:
    stages = [
        stage_file(tmp_path / "mine", "length_penalty", WEIGHTS={"output_tokens": 0.4}),
        stage_file(tmp_path / "mine", "overlong", BUFFER=4, PENALTY=0.5),
    ]
    changes: dict[str, Any] = {"max_steps": 1, "max_completion_length": 6, "advantage": advantage, "stage_fn": stages}
    run = run_to_end(tiny_trainer(tmp_path, by_length, lengths, kind=LossInputs, **changes))
    tokens = [2, 3, 4, 5]  # 1 to 4 letters and the end of the turn
    taken = [0.5 * 0.4 * n / 5 + 0.5 * max(0.0, (n - 2) / 4) for n in tokens]
    shaped = [float(n > 3) - one for n, one in zip(tokens, taken, strict=True)]
    expected = dict(zip(tokens, grouped_advantages(shaped, 4, advantage), strict=True))
    (inputs,) = run.seen
    n_tokens = inputs["completion_mask"].sum(1).tolist()
    assert dict(zip(n_tokens, inputs["advantages"].tolist(), strict=True)) == pytest.approx(expected)
    log = run.state.log_history[0]
    assert log["reward"] == 0.5  # what the reward function gave
    assert log["shaping/penalty"] == pytest.approx(0.5 * 0.4 * 3.5 / 5)
    assert log["shaping/overlong"] == pytest.approx(0.5 * (0 + 1 + 2 + 3) / 4 / 4)
