"""An episode that is cut into segments has the loss and the gradient of the whole one, whatever the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.segments import cut_into_segments, of_several_turns
from tests.support.trainings import CREDIT_BY_TURN, LOSSES, STILL, Gradients, LossInputs, run_to_end
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.errors import ConfigError
from toolgrpo.rollout import RolloutBatch
from toolgrpo.testing import ScriptedTools, tiny_trainer
from toolgrpo.trainer.training_pass import SegmentedRows

pytestmark = pytest.mark.contract

SMALL: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def some_alike(prompts: list[Any], **_: Any) -> list[float]:
    """The groups of two questions have nothing to teach."""
    numbers = [int(str(prompt[-1]["content"] if isinstance(prompt, list) else prompt)[1:]) for prompt in prompts]
    return [1.2 if number % 4 == 0 else (0.0, 0.5, 1.0, 0.5)[place % 4] for place, number in enumerate(numbers)]


def cut(whole: Trajectory) -> Trajectory:
    """Two of three episodes are cut, inside and outside of turns, once or twice."""
    n = len(whole.ids)
    return cut_into_segments(whole, *((), (n // 3,), (n // 4, n - 2))[sum(whole.ids) % 3])


class Cutting(LossInputs):
    """Trains on episodes that were cut."""

    def rollout(self, *args: Any, **kwargs: Any) -> RolloutBatch:
        batch = super().rollout(*args, **kwargs)
        return replace(batch, episodes=tuple(replace(one, trajectory=cut(one.trajectory)) for one in batch.episodes))


class ByLoss(Gradients):
    """Every step has another loss, if `losses` are given."""

    def __init__(self, losses: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.losses = losses
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.losses:
            self.trainer.loss_type = loss = self.losses[state.global_step]
            self.trainer.importance_sampling_level = "sequence" if loss == "luspo" else "token"


def trained(folder: Path, kind: type, losses: tuple[str, ...] = (), **changes: Any) -> tuple[Any, list[torch.Tensor]]:
    gradients = ByLoss(losses)
    parts = {"callbacks": [gradients], "tools": ScriptedTools({"look": lambda at: f"r{at}"})}
    given = {**STILL, **SMALL, **({"max_steps": len(losses)} if losses else {}), **changes}
    run = tiny_trainer(folder, some_alike, of_several_turns, kind=kind, parts=parts, **given)
    gradients.trainer = run
    run.model.double()
    return run_to_end(run), gradients.found


def check_alike(folder: Path, losses: tuple[str, ...] = (), **changes: Any) -> None:
    whole_run, expected = trained(folder / "whole", LossInputs, losses, **changes)
    cut_run, found = trained(folder / "cut", Cutting, losses, **changes)
    assert [one.keys() for one in cut_run.state.log_history] == [one.keys() for one in whole_run.state.log_history]
    assert any("segment_prompts" in inputs for inputs in cut_run.seen)
    assert not any("segment_prompts" in inputs for inputs in whole_run.seen), "a run without segments is what it was"
    assert len(found) == len(expected) > 0 and max(one.abs().max().item() for one in expected) > 1e-4
    gaps = [((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(found, expected, strict=True)]
    # In float64, but rotary angles are float32, and TRL's padding moves a row that becomes shorter.
    assert max(gaps) < (5e-6 if whole_run.args.prefix_sharing == "off" else 1e-6), gaps
    assert cut_run.losses == pytest.approx(whole_run.losses, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("prefix_sharing", ["off", "on"])
def test_the_gradient_of_every_loss_is_that_of_the_whole_episode(tmp_path: Path, prefix_sharing: str) -> None:
    check_alike(tmp_path, LOSSES, vllm_importance_sampling_correction=False, prefix_sharing=prefix_sharing)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "learning_rate": 1e-3, "prefix_sharing": "on", "importance_sampling_level": "sequence"},
        {"steps_per_generation": 8, "off_policy_mask_threshold": 0.5, "loss_type": "grpo", "skip_dead_rows": "off"},
        {"prefix_sharing": "off", "entropy_coef": 0.01, "max_tokens_per_pass": 300},
        {**CREDIT_BY_TURN, "num_iterations": 2},
    ],
    ids=str,
)
def test_a_run_over_segments_has_the_gradients_of_whole_episodes(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With the old policy's and the reference's pass, the engine's correction, and micro-batches in another order."""
    check_alike(tmp_path, **changes)


def test_a_run_resumes_in_the_middle_of_a_batch_of_segments(tmp_path: Path) -> None:
    """The second step takes what the checkpoint keeps of the batch of the first."""
    steps = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 4}
    rate = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}

    def run(folder: Path, resume: bool = False, **more: Any) -> Any:
        options = {**SMALL, **steps, **rate, **more}
        return run_to_end(tiny_trainer(folder, some_alike, of_several_turns, kind=Cutting, **options), resume)

    whole = run(tmp_path / "whole")
    run(tmp_path / "stopped", max_steps=2, save_strategy="steps", save_steps=2)
    resumed = run(tmp_path / "stopped", resume=True)
    assert len(resumed.losses) == 2 and all("segment_prompts" in inputs for inputs in resumed.seen)
    assert resumed.losses == whole.losses[2:]


def test_what_is_more_than_text_has_no_segments() -> None:
    rows = SegmentedRows(torch.tensor([[0, 1, 0]]))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match="more than text"):
        rows.score(lambda *_, **__: (ids, None, None), ids, ids, 3, token_type_ids=ids)


def test_every_process_makes_as_many_passes() -> None:
    """A row with nothing to read, and fewer segments than another process has."""
    asked: list[torch.Size] = []

    def score(ids: torch.Tensor, mask: torch.Tensor, width: int, **_: Any) -> Any:
        asked.append(ids.shape)
        return ids[:, -width:].float(), None, None

    ids = torch.arange(1, 11).view(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    rows = SegmentedRows(torch.tensor([[0, 1, 0], [0, 1, 0]]), most=lambda n: 5)
    logps, _, _ = rows.score(score, ids, mask, 3, batch_size=2)
    assert asked == [(5, 3)] and logps.tolist() == [[3, 0, 5], [0, 0, 0]]
    nothing, _, _ = rows.chosen(torch.tensor([False, True])).score(score, ids[1:], mask[1:], 3)
    assert asked[1] == (1, 2) and nothing.tolist() == [[0, 0, 0]]
