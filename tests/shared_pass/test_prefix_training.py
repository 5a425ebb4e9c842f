"""The trainer with shared prompts against the trainer with TRL's padded pass: losses, gradients and a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shared_pass.test_prefix_sharing import lengths_of
from tests.support.trainings import LOSSES, LossInputs, by_length, call_and_answer
from toolgrpo import ToolGRPOTrainer
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.testing import ScriptedTools, tiny_trainer


def trainer(tiny: Any, folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    options |= {"learning_rate": 1e-3, "record_episodes": False, "vllm_importance_sampling_clip_max": 3.0, **changes}
    tiny(0).save_pretrained(folder / "model")  # the reference model is loaded from there
    rows = [{"prompt": f"{'x' * 90} question {i}"} for i in range(8)]
    given: dict[str, Any] = {"model": str(folder / "model"), "kind": LossInputs, "rows": rows}
    given["parts"] = {"tools": ScriptedTools({"add": lambda a, b: str(a + b)})}
    made: Any = tiny_trainer(folder, by_length, call_and_answer, **given, **options)
    made.n_tokens = lengths_of(made.model)
    return made


def loss_and_gradient(run: Any, mode: str, batches: list[dict[str, Any]]) -> tuple[float, torch.Tensor]:
    """Of several micro-batches, accumulated."""
    run._shared_pass = SharedPass(mode=mode)
    run.model.train()
    run.model.zero_grad()
    total = 0.0
    for inputs in batches:
        loss = ToolGRPOTrainer._compute_loss(run, run.model, inputs)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in run.model.parameters()])


def test_every_loss_type_has_the_padded_pass_loss_and_gradient(tiny_qwen3: Any, tmp_path: Path) -> None:
    run = trainer(tiny_qwen3, tmp_path, beta=0.1, num_iterations=2)
    run.train()
    assert "ref_per_token_logps" in run.seen[0] and "old_per_token_logps" in run.seen[0]
    for loss_type in LOSSES:
        run.loss_type = loss_type
        loss, gradient = loss_and_gradient(run, "on", run.seen)
        expected_loss, expected = loss_and_gradient(run, "off", run.seen)
        assert expected.norm() > 1e-4, loss_type
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6), loss_type
        assert (gradient - expected).norm() < 1e-4 * expected.norm(), loss_type


def test_groups_stay_together_and_the_whole_gradient_is_that_of_trls_order(tiny_qwen3: Any, tmp_path: Path) -> None:
    ours = trainer(tiny_qwen3, tmp_path / "a", loss_type="dapo")
    theirs = trainer(tiny_qwen3, tmp_path / "b", loss_type="dapo", prefix_sharing="off")
    ours.train()
    theirs.train()

    def prompts(run: Any) -> list[set[tuple[int, ...]]]:
        return [{tuple(row.tolist()) for row in batch["prompt_ids"]} for batch in run.seen]

    assert [len(found) for found in prompts(ours)] == [1, 1], "each micro-batch holds one whole group"
    assert max(len(found) for found in prompts(theirs)) == 2, "TRL's shuffle mixes them"
    model = tiny_qwen3(0).state_dict()
    for run in (ours, theirs):
        run.model.load_state_dict(model)
    _, gradient = loss_and_gradient(ours, "on", ours.seen)
    _, expected = loss_and_gradient(theirs, "off", theirs.seen)
    assert expected.norm() > 1e-4
    assert (gradient - expected).norm() < 1e-4 * expected.norm()


MOVED: dict[str, Any] = {"beta": 0.1, "num_iterations": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {**MOVED, "max_steps": 8},
        {"max_tokens_per_pass": 260, "max_steps": 4, "gradient_checkpointing": True},
        # Larger steps let the loss run away here, and the rounding noise with it, tenfold a step.
        pytest.param({**MOVED, "max_steps": 20, "learning_rate": 0.002}, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_losses_of_the_padded_run(tiny_qwen3: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    # Plain SGD: Adam's first steps divide rounding noise by itself where a gradient is nearly zero.
    common = {"optim": "sgd", "learning_rate": 0.01, "loss_type": "dapo", **changes}
    ours = trainer(tiny_qwen3, tmp_path / "a", prefix_sharing="on", **common)
    theirs = trainer(tiny_qwen3, tmp_path / "b", **{**common, "prefix_sharing": "off", "max_tokens_per_pass": None})
    start = [p.detach().clone() for p in ours.model.parameters()]
    ours.train()
    theirs.train()
    for mine, his in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key in ("loss", "grad_norm", "entropy", "kl"):
            assert (key in mine) == (key in his)
            if key in his:
                # Each step makes the rounding of the one before larger; how much of it there is depends on the processor.
                assert mine[key] == pytest.approx(his[key], rel=5e-3, abs=2e-5), key
    assert len(ours.state.log_history) == changes["max_steps"] + 1
    for a, b, before in zip(ours.model.parameters(), theirs.model.parameters(), start, strict=True):
        assert (a - b).norm() < 1e-3 * (b - before).norm() + 1e-6
    if "max_tokens_per_pass" in changes:
        assert max(ours.n_tokens) <= changes["max_tokens_per_pass"]
    else:
        assert sum(ours.n_tokens) < 0.9 * sum(theirs.n_tokens), "no fewer tokens were computed"
