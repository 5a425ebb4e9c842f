"""What tests keep of a training: its batches, what TRL's loss was given, gradients, and what was logged at each step."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from toolgrpo import ToolGRPOTrainer
from toolgrpo.engines.base import SampleRequest
from toolgrpo.observe.records import read_episodes
from toolgrpo.rollout import Observer, RolloutBatch
from toolgrpo.testing import ByteChat

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
STILL: dict[str, Any] = {"learning_rate": 1e-12, "max_grad_norm": 0.0}  # every step has the first weights' gradient
CREDIT_BY_TURN: dict[str, Any] = {"stage_fn": [str(Path(__file__).parents[1] / "fixtures/stages/calls_by_turn.py")]}
STAGES = Path(__file__).parents[2] / "recipes" / "stages"


def stage_file(folder: Path, name: str, **constants: Any) -> str:
    """Return a copy of a recipe's stage with other constants, as a user makes one."""
    text = (STAGES / f"{name}.py").read_text()
    for constant, value in constants.items():
        text, n = re.subn(rf"^{constant} = .*$", f"{constant} = {value!r}", text, flags=re.MULTILINE)
        assert n == 1, constant
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


def call_and_answer(request: SampleRequest, number: int) -> list[int]:
    """A call first; then answers of differing length, so that padding has something to do."""
    answered = ">tool:" in ByteChat.text(request.ids)
    return ByteChat.say("end" + "." * (number % 5) if answered else 'call add {"a": 1, "b": 2}')


def varied(request: SampleRequest, number: int) -> list[int]:
    """An answer that depends on the question and on how many requests there were in the whole run."""
    return ByteChat.say("abcdefghijklm"[: (sum(request.ids) * 7 + number * 5) % 13 + 1])


def call_and_vary(request: SampleRequest, number: int) -> list[int]:
    """A call first; then an answer as `varied`."""
    answered = ">tool:" in ByteChat.text(request.ids)
    return varied(request, number) if answered else ByteChat.say('call add {"a": 1, "b": 2}')


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[-1]["content"]) % 3) for completion in completions]


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


def signalled(step: int, number: signal.Signals = signal.SIGTERM) -> BeforeOptimizerStep:
    """Sends this process a signal in the middle of a step."""
    return BeforeOptimizerStep(step, lambda: os.kill(os.getpid(), number))


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))


class LossInputs(ToolGRPOTrainer):
    """Keeps the batches that TRL computes its loss from, and the losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.seen.append(dict(inputs))
        loss = super()._compute_loss(model, inputs)
        self.losses.append(float(loss.detach()))
        return loss


def run_to_end(trainer: Any, resume: Any = None) -> Any:
    """Train, close the trainer whatever happens, and return it."""
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()
    return trainer


def same_weights(one: Any, other: Any) -> bool:
    """Say if the models of two trainers are equal bit for bit."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def step_logs(trainer: Any) -> list[dict[str, Any]]:
    """What was logged of each optimizer step."""
    return [log for log in trainer.state.log_history if "loss" in log]


def recorded(folder: Path, *more: str) -> list[list[Any]]:
    """What a recording says of each episode, without clock times."""
    keys = ("step", "row", "ids", "reward_given", *more)
    return [[r[key] for key in keys] + [r["metadata"]["episode"]] for r in read_episodes(folder / "episodes.jsonl")]
