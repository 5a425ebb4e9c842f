"""What `trainer/trl/batch.py` relies on in TRL. A failure here says what to look at after an upgrade.

That a row without an advantage adds nothing to any loss is held by `test_live_rows.py`, with numbers.
"""

from __future__ import annotations

import inspect
import re

import pytest
from trl import GRPOTrainer

pytestmark = pytest.mark.contract

SCORED = inspect.getsource(GRPOTrainer._generate_and_score_completions)
LOSS = inspect.getsource(GRPOTrainer._compute_loss)


def test_the_loss_knows_no_type_that_we_do_not() -> None:
    known = {"grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"}
    compared = "".join(re.findall(r"self\.loss_type (?:==|!=|in) (.+?):", LOSS))
    assert set(re.findall(r'"(\w+)"', compared)) == known, (
        "say in learning/training_rows.py what a new one is divided by"
    )


def test_the_old_policy_is_still_read_before_rewards_are_asked_and_when_we_think() -> None:
    assert SCORED.index("old_per_token_logps, _, _ =") < SCORED.index("self._calculate_rewards(")
    condition = SCORED[SCORED.index("generate_every =") : SCORED.index("old_per_token_logps, _, _ =")]
    assert "gradient_accumulation_steps % generate_every != 0" in condition, "see reads_old_policy"
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in condition, "see reads_old_policy"


def test_nan_stays_what_nobody_could_score() -> None:
    assert "torch.nan_to_num(per_token_logps_diff, nan=0.0)" in SCORED
    assert "delta[mask & ~torch.isnan(delta)]" in SCORED
    assert "math.isnan" in inspect.getsource(GRPOTrainer.log), "see mean_entropy_of_live"
