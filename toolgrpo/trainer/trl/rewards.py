"""Rewards as TRL wants them, and reward models as it asks them. Tested with TRL 1.16.0.

What is private and used (`tests/trainer/test_trl_rewards.py` fails with a sentence when it changes):

* `GRPOTrainer._calculate_rewards(inputs, prompts, completions, completion_ids_list)` gives the rewards
  of all processes, an episode a row, a function a column; NaN where a function does not score it. A row
  with NaN alone leaves mean and standard deviation, and its advantage is 0;
* `GRPOTrainer._pending_extra_logs` and `_pending_metrics` collect what rewards log until the batch is
  scored;
* a reward model is asked about prompt and completion as one conversation, in the template of its own
  tokenizer (`reward_processing_classes`) with `chat_template_kwargs`, on the device where
  `Trainer._prepare_inputs` puts it; the first logit is the reward;
* `GRPOTrainer._metrics[mode]["reward"]` is the mean reward of what is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from trl import GRPOTrainer, apply_chat_template

from toolgrpo.errors import ConfigError
from toolgrpo.rollout.batch import Scored
from toolgrpo.rollout.row_parts import as_messages
from toolgrpo.trainer.batches import TakenBatch
from toolgrpo.trainer.trl.trainer import log_metrics


def check_models(trainer: GRPOTrainer) -> None:
    """Raise if a reward model would have to be asked by one process alone, and cannot be."""
    has_model = any(isinstance(one, torch.nn.Module) for one in trainer.reward_funcs)
    if trainer.args.draws_groups and has_model and trainer.backend.splits_parameters:
        raise ConfigError(
            "dynamic_sampling asks rewards when a group ends, in each process for itself, but the "
            "reward model is split over the processes; use a reward function, or a backend that splits nothing"
        )


def ask_model(trainer: GRPOTrainer, number: int, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    """Return what a reward model says of these conversations."""
    model, tokenizer = trainer.reward_funcs[number], trainer.reward_processing_classes[number]
    whole = [{"messages": [*as_messages(p), *c]} for p, c in zip(prompts, completions, strict=True)]
    texts = [apply_chat_template(one, tokenizer, **trainer.chat_template_kwargs)["text"] for one in whole]
    inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    with torch.inference_mode():
        scores: list[float] = model(**Trainer._prepare_inputs(trainer, inputs)).logits[:, 0].float().tolist()
    return scores


def rewards_of_all(trainer: GRPOTrainer, taken: TakenBatch) -> torch.Tensor:
    """Return the rewards of the batches of all processes; what the rewards have logged goes to TRL with it."""
    for name, values in taken.answers.columns.items():
        trainer._pending_extra_logs[name].extend(values)
    for name, numbers in taken.answers.metrics.items():
        trainer._pending_metrics[name].extend(numbers)
    own = [
        (math.nan,) * len(values) if one.drop is not None else values
        for one, values in zip(taken.scored, taken.answers.values, strict=True)
    ]
    device = trainer.accelerator.device
    everything: torch.Tensor = trainer.accelerator.gather(torch.tensor(own, dtype=torch.float32, device=device))
    return everything


def log_drawn(trainer: GRPOTrainer, taken: TakenBatch) -> None:
    """Let `reward` be the mean of everything that was drawn; TRL's, of what is trained on, stands beside it."""
    if taken.metrics_of_all is None:
        return
    collected = trainer._metrics["train"]
    collected["reward_trained"].append(collected["reward"].pop())
    collected["reward"].append(taken.reward)
    log_metrics(trainer, taken.metrics_of_all)


def log_evaluation(trainer: GRPOTrainer, own: Sequence[Scored]) -> tuple[dict[str, float], int]:
    """Log success and rewards over the episodes of all processes, for TRL's next log; return them, and how many were scored."""
    shown = [(bool(one.success), {"reward": one.total, **_by_function(one)}) for one in own]
    of_all: list[tuple[bool, dict[str, float | None]]] = gather_object(shown)
    metrics = {"success": sum(success for success, _ in of_all) / max(1, len(of_all))}
    for name in dict.fromkeys(name for _, rewards in of_all for name in rewards):
        values = [value for _, rewards in of_all if (value := rewards.get(name)) is not None]
        metrics[name] = sum(values) / len(values) if values else math.nan
    trainer._metrics["eval"].update({name: [value] for name, value in metrics.items()})
    return metrics, len(of_all)


def _by_function(episode: Scored) -> dict[str, float | None]:
    return {f"rewards/{name}/mean": value for name, value in episode.rewards.items()}
