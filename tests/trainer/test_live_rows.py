"""Rows without an advantage stay out of the training pass, and the gradient is that of the full pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainings import LOSSES, STILL, Gradients, run_to_end, step_logs
from toolgrpo.engines.base import SampleRequest
from toolgrpo.learning.stages import NEEDS_EVERY_ROW, why_every_row
from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.testing.trainers import tiny_config
from toolgrpo.trainer.trainer import ToolGRPOTrainer

pytestmark = pytest.mark.contract

SCALES = ("group", "batch", "none")
# Four groups of four in four micro-batches.
SMALL: dict[str, Any] = {**STILL, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


def script(request: SampleRequest, number: int) -> list[int]:
    """Answers of several lengths: the rows of a batch weigh differently in its tokens."""
    return ByteChat.say("abcdefghijklm"[: 1 + (sum(request.ids) + 5 * number) % 13])


def question_of(prompt: Any) -> int:
    return int(str(prompt[-1]["content"] if isinstance(prompt, list) else prompt)[1:])


def some_alike(prompts: list[Any], **_: Any) -> list[float]:
    """Even questions: all get 1.2, which is not quite the mean of such floats. Odd ones differ; two have the mean."""
    differing = (0.0, 0.5, 1.0, 0.5) * len(prompts)
    return [one if question_of(prompt) % 2 else 1.2 for one, prompt in zip(differing, prompts, strict=False)]


def all_alike(prompts: list[Any], **_: Any) -> list[float]:
    return [1.2] * len(prompts)


class BothWays(ToolGRPOTrainer):
    """Computes the loss of every micro-batch over all rows too, and keeps both gradients; each step scales another way."""

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full, self.skipped = list[torch.Tensor](), list[torch.Tensor]()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.scale_rewards = SCALES[self.state.global_step]
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked = self.args
        self.args = asked.changed(skip_dead_rows="off")
        self.full.append(gradient(super().compute_loss(model, inputs, *args, **kwargs), model))
        self.args = asked
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.skipped.append(gradient(loss, model))
        return loss


def gradient(loss: torch.Tensor, model: Any) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def trained(folder: Path, reward: Any = some_alike, **changes: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """The gradients of the optimizer steps, and what was logged."""
    gradients = Gradients()
    parts = {"callbacks": [gradients]}
    trainer = run_to_end(tiny_trainer(folder, reward, script, parts=parts, **{**SMALL, **changes}))
    return gradients.found, step_logs(trainer)


def gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(found) == len(expected) > 0
    return max((mine - other).abs().max().item() for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_is_that_of_the_full_pass(tmp_path: Path, loss_type: str) -> None:
    """Of every micro-batch, for every way to scale rewards."""
    changes = {**SMALL, "max_steps": len(SCALES), "max_completion_length": 20, "loss_type": loss_type}
    changes["importance_sampling_level"] = "sequence" if loss_type == "luspo" else "token"
    changes["vllm_importance_sampling_correction"] = False  # scripted log-probabilities are far from the model's
    trainer = run_to_end(tiny_trainer(tmp_path, some_alike, script, kind=BothWays, **changes))
    assert len(trainer.full) == 4 * len(SCALES)
    steps = torch.stack(trainer.full).unflatten(0, (len(SCALES), 4)).sum(1)
    assert steps.abs().amax(dim=1).min() > 1e-2, "each step has something to teach"
    assert gap(trainer.skipped, trainer.full) < 1e-6
    skipped = [log["signal/rows_skipped"] for log in step_logs(trainer)]
    assert len(skipped) == len(SCALES) and min(skipped) >= 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "learning_rate": 1e-3, "prefix_sharing": "on", "importance_sampling_level": "sequence"},
        {"prefix_sharing": "off", "mask_truncated_completions": True, "max_completion_length": 9},
        {"steps_per_generation": 8, "off_policy_mask_threshold": 0.5, "loss_type": "grpo"},
    ],
    ids=str,
)
def test_a_run_has_the_gradients_of_the_full_pass(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With the engine's correction, old log-probabilities and rows in another order."""
    full, _ = trained(tmp_path / "full", skip_dead_rows="off", **changes)
    skipped, logs = trained(tmp_path / "skipped", **changes)
    assert logs[0]["signal/rows_skipped"] >= 0.5 and logs[0]["signal/tokens_skipped"] > 0.3
    assert max(one.abs().max().item() for one in full) > 1e-5
    assert gap(skipped, full) < 1e-6


@pytest.mark.parametrize("changes", [{"loss_type": "bnpo"}, {"entropy_coef": 0.05}], ids=str)
def test_rows_stay_where_the_loss_is_a_mean_over_a_micro_batch(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whatever may share a prompt: short episodes together would have a small denominator of their own."""

    def some_long(request: SampleRequest, number: int) -> list[int]:
        return ByteChat.say("ab" if sum(request.ids) % 2 else "abcdefghijklmn"[: 10 + number % 4])

    def by_number(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 4) for number in range(len(completions))]

    found = []
    for sharing in ("off", "on"):
        kept = Gradients()
        given = {**STILL, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **changes}
        given |= {"skip_dead_rows": "off", "vllm_importance_sampling_correction": False, "prefix_sharing": sharing}
        run_to_end(tiny_trainer(tmp_path / sharing, by_number, some_long, parts={"callbacks": [kept]}, **given))
        found.append(kept.found)
    assert gap(found[1], found[0]) < 1e-4 * max(one.abs().max().item() for one in found[0])


@pytest.mark.parametrize("engine_differs", [True, False], ids=["other engine", "two iterations"])
def test_the_old_policy_reads_live_groups_only(tmp_path: Path, engine_differs: bool) -> None:
    """One row of a batch without any is still read, and rewards are asked once."""
    read, asked = list[int](), list[int]()

    class Counting(ToolGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            logps, *rest = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            if not torch.is_grad_enabled():
                read.append(int((~logps.isnan().all(dim=1)).sum()))
            return logps, *rest

    def reward(prompts: list[Any], **kwargs: Any) -> list[float]:
        asked.append(len(prompts))
        return some_alike(prompts) if len(asked) == 1 else all_alike(prompts)

    changes = {**SMALL, "max_steps": 2, "vllm_importance_sampling_correction": engine_differs}
    changes["num_iterations"] = 1 if engine_differs else 2
    logs = step_logs(run_to_end(tiny_trainer(tmp_path, reward, script, kind=Counting, **changes)))
    assert (asked, read) == (([16, 16], [8, 1]) if engine_differs else ([16], [8]))
    if engine_differs:
        assert min(log["sampling/sampling_logp_difference/mean"] for log in logs) > 1, "one row was compared"


def test_the_engines_ratios_are_those_of_the_rows_that_were_read(tmp_path: Path) -> None:
    names = [f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
    changes = {"max_steps": 1, "rollout_correction": "trl", "vllm_importance_sampling_mode": "token_truncate"}
    _, (log,) = trained(tmp_path, **changes)
    assert log["signal/rows_skipped"] >= 0.5
    assert 0 < log[names[0]] < log[names[1]] < log[names[2]] < 0.5, "each scripted token is far from the model's"


def test_a_batch_without_anything_to_teach_has_no_gradient_and_no_entropy(tmp_path: Path) -> None:
    gradients, logs = trained(tmp_path, all_alike, max_steps=1)
    assert not gradients[0].any()
    assert logs[0]["signal/rows_skipped"] == 1 and logs[0]["entropy"] is None


def test_what_needs_every_row_is_known(tmp_path: Path) -> None:
    assert why_every_row(tiny_config(tmp_path)) is None
    reading = {"beta": 0.1, "entropy_coef": 0.01, "use_adaptive_entropy": True, "top_entropy_quantile": 0.5}
    for changes in ({name: value} for name, value in reading.items()):
        assert why_every_row(tiny_config(tmp_path, **changes)) in NEEDS_EVERY_ROW, changes
