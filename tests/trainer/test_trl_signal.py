"""What `trainer/trl_signal.py` relies on in TRL, and what it does to a batch of TRL's."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from toolgrpo import ToolGRPOTrainer
from toolgrpo.drops import Drop, DropCause
from toolgrpo.engines.base import SampleRequest
from toolgrpo.signal.advantages import grouped_advantages
from toolgrpo.signal.shaping import EpisodeSize, Member
from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.trainer.trl_signal import quiet_about_unscored, with_advantages, without_dropped

pytestmark = pytest.mark.contract

SIZE = EpisodeSize(1, 0, 1, 0)
LOST = Member(None, Drop(DropCause.TOOL, "no network"), SIZE)
SCORED = Member(1.0, None, SIZE)


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_a_row_of_nan_still_leaves_mean_standard_deviation_and_advantage() -> None:
    text = source(GRPOTrainer._generate_and_score_completions)
    for line in (
        "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)",
        "rewards[unscorable_mask] = torch.nan",
        "advantages = torch.nan_to_num(advantages, nan=0.0)",
    ):
        assert line in text, f"TRL no longer says `{line}`; look at without_dropped"


def test_the_warning_of_such_rows_is_still_the_one_that_is_kept_quiet(caplog: pytest.LogCaptureFixture) -> None:
    assert "All reward functions returned None for the following kwargs" in source(GRPOTrainer._calculate_rewards)
    logger = logging.getLogger("trl.trainer.grpo_trainer")
    with quiet_about_unscored():
        logger.warning("All reward functions returned None for the following kwargs:\n{}")
        logger.warning("something else")
    logger.warning("All reward functions returned None for the following kwargs:\n{}")
    assert [record.message[:14] for record in caplog.records] == ["something else", "All reward fun"]


def batch() -> dict[str, Any]:
    return {
        "advantages": torch.tensor([0.1, 0.2]),
        "completion_mask": torch.ones(2, 3, dtype=torch.long),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
    }


def trainer(process_index: int = 0) -> Any:
    return SimpleNamespace(accelerator=SimpleNamespace(process_index=process_index))


def test_by_default_the_tensors_of_trl_go_through_untouched() -> None:
    before = batch()
    after = with_advantages(trainer(), before, [SCORED, SCORED], None)
    assert all(after[name] is before[name] for name in before)
    rewards = torch.ones(2, 1)
    assert without_dropped(rewards, [SCORED, SCORED]) is rewards


def test_each_process_takes_its_own_rows() -> None:
    members = [SCORED, SCORED, LOST, SCORED]
    after = with_advantages(trainer(1), batch(), members, [1.0, 2.0, 3.0, 4.0])
    assert after["advantages"].tolist() == [3.0, 4.0] and after["tool_mask"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert without_dropped(torch.ones(4, 2), members).isnan().any(dim=1).tolist() == [False, False, True, False]


def lengths(request: SampleRequest, number: int) -> list[int]:
    return ByteChat.say("a" * (1 + number % 4))


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[-1]["content"]) > 2) for completion in completions]


class Seen(ToolGRPOTrainer):
    """Keeps the last batch that TRL computes its loss from."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.seen = inputs
        return super()._compute_loss(model, inputs)


@pytest.mark.e2e
@pytest.mark.parametrize("advantage", ["loo", "grpo"])
def test_shaped_rewards_become_the_advantages_that_are_trained_on(tmp_path: Path, advantage: str) -> None:
    run = tiny_trainer(
        tmp_path,
        by_length,
        lengths,
        kind=Seen,
        max_steps=1,
        max_completion_length=6,
        advantage=advantage,
        penalty={"output_tokens": 0.4},
        overlong={"buffer": 4, "penalty": 0.5},
    )
    run.train()
    tokens = [2, 3, 4, 5]  # 1 to 4 letters and the end of the turn
    taken = [0.5 * 0.4 * n / 5 + 0.5 * max(0.0, (n - 2) / 4) for n in tokens]
    shaped = [float(n > 3) - one for n, one in zip(tokens, taken, strict=True)]
    expected = dict(zip(tokens, grouped_advantages(shaped, 4, advantage), strict=True))
    n_tokens = run.seen["completion_mask"].sum(1).tolist()
    assert dict(zip(n_tokens, run.seen["advantages"].tolist(), strict=True)) == pytest.approx(expected)
    log = run.state.log_history[0]
    assert log["reward"] == 0.5  # what the reward function gave
    assert log["shaping/penalty"] == pytest.approx(0.5 * 0.4 * 3.5 / 5)
    assert log["shaping/overlong"] == pytest.approx(0.5 * (0 + 1 + 2 + 3) / 4 / 4)
