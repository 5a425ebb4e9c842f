"""What `trainer/trl_batch.py` relies on in TRL. A failure here says what to look at after an upgrade.

That a row without an advantage adds nothing to any loss is held by `test_live_rows.py`, with numbers.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from trl import GRPOTrainer

from toolgrpo.trainer.live_rows import RowChoice, is_live
from toolgrpo.trainer.trl_batch import fill_old_logps

pytestmark = pytest.mark.contract

SCORED = inspect.getsource(GRPOTrainer._generate_and_score_completions)
LOSS = inspect.getsource(GRPOTrainer._compute_loss)


def test_the_loss_knows_no_type_that_we_do_not() -> None:
    known = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}
    compared = "".join(re.findall(r"self\.loss_type (?:==|!=|in) (.+?):", LOSS))
    assert set(re.findall(r'"(\w+)"', compared)) == known, "say in signal/training_rows.py what a new one is divided by"


def test_the_old_policy_is_still_read_before_rewards_are_asked_and_when_we_think() -> None:
    assert SCORED.index("old_per_token_logps, _, _ =") < SCORED.index("self._calculate_rewards(")
    condition = SCORED[SCORED.index("generate_every =") : SCORED.index("old_per_token_logps, _, _ =")]
    assert "gradient_accumulation_steps % generate_every != 0" in condition, "see reads_old_policy"
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in condition, "see reads_old_policy"


def test_nan_stays_what_nobody_could_score() -> None:
    assert "torch.nan_to_num(per_token_logps_diff, nan=0.0)" in SCORED
    assert "delta[mask & ~torch.isnan(delta)]" in SCORED
    assert "math.isnan" in inspect.getsource(GRPOTrainer.log), "see mean_entropy_of_live"


def test_a_row_is_live_if_a_token_that_is_trained_has_an_advantage() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert is_live(torch.tensor([0.5, 0.0, 0.5]), mask).tolist() == [True, False, False]
    per_token = torch.tensor([[0.0, 0.0, 0.5], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert is_live(per_token, mask).tolist() == [False, True, False]


def test_a_row_that_was_not_read_and_has_an_advantage_is_an_error() -> None:
    batch = {
        "advantages": torch.tensor([0.5, 0.0]),
        "completion_mask": torch.ones(2, 2, dtype=torch.long),
        "old_per_token_logps": torch.tensor([[-1.0, -1.0], [torch.nan, torch.nan]]),
    }
    filled = fill_old_logps(batch, RowChoice(torch.tensor([True, False]), torch.nan))
    assert filled["old_per_token_logps"].tolist() == [[-1.0, -1.0], [0.0, 0.0]]
    with pytest.raises(RuntimeError, match="dead_by_rewards_alone"):
        fill_old_logps(batch, RowChoice(torch.tensor([False, True]), torch.nan))
