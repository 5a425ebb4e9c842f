"""What `trainer/trl/calls.py` relies on in TRL, and what a run makes of off-policy tokens.

That a row without an advantage adds nothing to any loss is held by `test_live_rows.py`, with numbers.

Two engines stand for what a GPU does: one whose log-probabilities are rounded to bf16, and one that
draws from weights one step old.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from tests.support.off_policy_engines import LateEngine, RoundedEngine
from tests.support.trainings import LOSSES, LossInputs, by_length, run_to_end, step_logs, varied
from toolgrpo.errors import ConfigError
from toolgrpo.testing.trainers import tiny_qwen3, tiny_trainer

pytestmark = pytest.mark.contract

SCORED = inspect.getsource(GRPOTrainer._generate_and_score_completions)
LOSS = inspect.getsource(GRPOTrainer._compute_loss)
SMALL: dict[str, Any] = {
    "vllm_importance_sampling_mode": "sequence_mask",  # TRL's default, which tiny_config changes
    "per_device_train_batch_size": 16,
    "max_completion_length": 250,  # a random model ends a turn by chance, so lengths are of every size
    "max_turns": 1,
}


def half(prompts: list[Any], **_: Any) -> list[float]:
    return [float(place % 2) for place in range(len(prompts))]


class Passes(LossInputs):
    """Counts the passes that have no gradient."""

    without_gradient = told = 0

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        before = self.told
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.without_gradient += not torch.is_grad_enabled() and self.told > before
        return found


def trained(folder: Path, kind: type, **changes: Any) -> tuple[Passes, list[dict[str, Any]], list[str]]:
    """The trainer, what it logged, and what it said."""
    said: list[str] = []
    parts = {"engine": kind(tiny_qwen3())}
    trainer = tiny_trainer(folder, half, None, kind=Passes, parts=parts, **{**SMALL, **changes})
    trainer.model.register_forward_hook(lambda *_: setattr(trainer, "told", trainer.told + 1))
    trainer.off_policy._warn = said.append
    return run_to_end(trainer), step_logs(trainer), said


def test_the_loss_knows_no_type_that_we_do_not() -> None:
    compared = "".join(re.findall(r"self\.loss_type (?:==|!=|in) (.+?):", LOSS))
    assert set(re.findall(r'"(\w+)"', compared)) == set(LOSSES), (
        "say in learning/stages.py what a new one is divided by"
    )


def test_the_old_policy_is_still_read_before_rewards_are_asked_and_when_we_think() -> None:
    assert SCORED.index("old_per_token_logps, _, _ =") < SCORED.index("self._calculate_rewards(")
    condition = SCORED[SCORED.index("generate_every =") : SCORED.index("old_per_token_logps, _, _ =")]
    assert "gradient_accumulation_steps % generate_every != 0" in condition, "see reads_old_policy"
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in condition, "see reads_old_policy"


def test_trl_reads_and_weights_as_we_think_and_nan_is_what_nobody_could_score() -> None:
    assert "torch.nan_to_num(per_token_logps_diff, nan=0.0)" in SCORED
    assert "delta[mask & ~torch.isnan(delta)]" in SCORED
    assert "math.isnan" in inspect.getsource(GRPOTrainer.log), "see mean_entropy_of_live"
    both = "self.use_vllm and self.vllm_importance_sampling_correction"
    assert SCORED.count(both) == 4, "see correct_by"
    assert LOSS.count(both) == 1 and 'per_token_loss * inputs["importance_sampling_ratio"]' in LOSS
    assert 'in ["sequence_truncate", "token_truncate"]' in SCORED
    assert "max=self.vllm_importance_sampling_clip_max" in SCORED
    assert 'inputs.get("old_per_token_logps")' in LOSS, "see with_engine_as_old_policy"
    assert "log_ratio = per_token_logps - old_per_token_logps" in LOSS
    assert 'output["sampling_per_token_logps"] = sampling_per_token_logps' in SCORED
    first = SCORED.index("self._get_per_token_logps_and_entropies(")
    assert SCORED.index("old_per_token_logps, _, _ =") < first < SCORED.index("self.ref_model"), "see old_policy"
    for name in ("epsilon_low", "epsilon_high", "importance_sampling_level"):
        assert f"self.{name}" in LOSS, "see weights_in_loss"


@pytest.mark.parametrize(("bf16", "method"), [(False, "off"), (True, "bypass")])
def test_an_engine_with_the_trainers_weights_is_corrected_where_the_two_round_apart(
    tmp_path: Path, bf16: bool, method: str
) -> None:
    changes = {**SMALL, "max_steps": 1, "max_completion_length": 40}
    trainer = run_to_end(tiny_trainer(tmp_path, half, None, engine="transformers", bf16=bf16, **changes))
    assert trainer.correction.method == method
    assert ("sampling/sampling_logp_difference/mean" in step_logs(trainer)[0]) is bf16


def test_rounded_log_probabilities_weigh_long_episodes_by_chance_with_trl_and_not_by_default(tmp_path: Path) -> None:
    _, of_trl, _ = trained(tmp_path / "trl", RoundedEngine, rollout_correction="trl", max_steps=1)
    trainer, ours, said = trained(tmp_path / "default", RoundedEngine, max_steps=1)
    assert trainer.correction.method == "bypass" and "one update" in trainer.correction.why
    trap, log, difference = of_trl[0], ours[0], "sampling/sampling_logp_difference/mean"
    assert 0.002 < log[difference] < 0.02 and log[difference] == pytest.approx(trap[difference], rel=1e-3)
    assert 1 - trap["correction/ess/q4"] > 10 * (1 - trap["correction/ess/q1"]), "the longer, the more by chance"
    assert 1 - trap["correction/ess/q4"] > 50 * (1 - log["correction/ess/q4"])
    assert log["correction/masked_episodes"] == 0 and log["correction/masked_tokens"] == 0
    assert not [text for text in said if "biases" in text]


def test_a_loss_that_trl_refuses_with_its_correction_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "loss_type": "vespo",
        "rollout_correction": "trl",
        "vllm_importance_sampling_mode": "sequence_mask",
    }
    with pytest.raises(
        ConfigError, match="vespo with rollout_correction trl needs a vllm_importance_sampling_mode by token"
    ):
        tiny_trainer(tmp_path, by_length, varied, **changes).close()


def test_bypass_makes_the_engine_the_old_policy(tmp_path: Path) -> None:
    """Also where TRL would read it, since the batch gets several updates."""
    changes = {"rollout_correction": "bypass", "num_iterations": 2, "learning_rate": 1e-3}
    trainer, logs, _ = trained(tmp_path, RoundedEngine, **changes)
    assert trainer.without_gradient == 0 and len(trainer.seen) == 2
    for inputs in trainer.seen:
        assert "importance_sampling_ratio" not in inputs
        assert torch.equal(inputs["old_per_token_logps"], inputs["sampling_per_token_logps"])
    assert [("correction/ess" in log) for log in logs] == [True, False], "a batch is measured once"


def test_geo_tis_counts_episodes_near_the_policy_by_truncated_ratios(tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "max_steps": 4, "learning_rate": 3e-4, "correction_band": [0.999, 1.001]}
    trainer, logs, _ = trained(tmp_path, LateEngine, **changes)
    assert trainer.correction.method == "geo_tis" and trainer.without_gradient == 2
    inputs = trainer.seen[2]
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    log_ratio = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * mask
    n_tokens = mask.sum(1)
    wider = (1000 / n_tokens).clamp(min=1).sqrt()
    near = (log_ratio.sum(1) / n_tokens).abs() <= math.log(1.001) * wider
    assert 0 < near.sum() < len(near), "some are left out"
    expected = log_ratio.exp().clamp(max=2.0) * near.unsqueeze(1)
    torch.testing.assert_close(inputs["importance_sampling_ratio"], expected)
    assert (inputs["advantages"][~near] == 0).all() and inputs["advantages"][near].any()
    assert logs[2]["correction/masked_episodes"] == pytest.approx((~near).float().mean().item())
    assert logs[2]["sampling/dropped_episodes"] == pytest.approx((~near).float().mean().item())


def test_a_cut_distribution_is_warned_of_with_the_size_of_its_bias(tmp_path: Path) -> None:
    _, _, said = trained(tmp_path, RoundedEngine, top_k=20, max_completion_length=60, max_steps=1)
    (warning,) = [text for text in said if "biases" in text]
    assert warning.startswith("top_k 20 biases rollout_correction bypass") and "a token is weighted by 0." in warning
