"""What tests keep of a training: its batches, what TRL's loss was given, and what was logged at each step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from toolgrpo import ToolGRPOTrainer
from toolgrpo.observe.records import read_episodes
from toolgrpo.rollout import Observer, RolloutBatch


class KeptBatches(Observer):
    def __init__(self) -> None:
        self.batches: list[RolloutBatch] = []

    def batch_done(self, batch: RolloutBatch) -> None:
        self.batches.append(batch)


class BeforeOptimizerStep(TrainerCallback):
    """Does something when the training pass of a step is almost over."""

    def __init__(self, step: int, do: Callable[[], Any]) -> None:
        self.step, self.do = step, do

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.do()


class LossInputs(ToolGRPOTrainer):
    """Keeps the batches that TRL computes its loss from."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.seen = [*getattr(self, "seen", []), inputs]
        return super()._compute_loss(model, inputs)


def step_logs(trainer: Any) -> list[dict[str, Any]]:
    """What was logged of each optimizer step."""
    return [log for log in trainer.state.log_history if "loss" in log]


def recorded(folder: Path, *more: str) -> list[list[Any]]:
    """What a recording says of each episode, without clock times."""
    keys = ("step", "row", "ids", "reward_given", *more)
    return [[r[key] for key in keys] + [r["metadata"]["episode"]] for r in read_episodes(folder / "episodes.jsonl")]
