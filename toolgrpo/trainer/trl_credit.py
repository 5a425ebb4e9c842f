"""Advantages by turn in the batches that TRL makes, and what the model says of gold answers.

A fourth file beside `trl_seam.py`, `trl_batch.py` and `trl_signal.py` that knows TRL's trainer
(`tests/trainer/test_trl_credit.py`):

* `_compute_loss` takes `advantages` of (B,) or (B, T), one for each completion token, and every loss
  of `LOSSES_BY_TOKEN` weighs each token by its own;
* what `_generate_and_score_completions` returns is shuffled and cut by rows, whatever its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from toolgrpo.credit.info_gain import AnswerAt
from toolgrpo.errors import ConfigError
from toolgrpo.shared_pass.answers import mean_answer_logps
from toolgrpo.trajectory import Trajectory

__all__ = ["advantages_of_all", "answer_logps", "own_part", "with_turn_advantages"]

T = TypeVar("T")


def advantages_of_all(trainer: Any, output: dict[str, Any]) -> list[float]:
    """Return the advantages of the episodes of all processes, which all must ask for."""
    everything: list[float] = trainer.accelerator.gather(output["advantages"]).tolist()
    return everything


def own_part(trainer: Any, output: dict[str, Any], of_all: Sequence[T]) -> list[T]:
    """Return what belongs to the rows of this process."""
    n_own = len(output["advantages"])
    start = trainer.accelerator.process_index * n_own
    return list(of_all[start : start + n_own])


def with_turn_advantages(
    output: dict[str, Any], trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return TRL's batch with each sampled token's turn's advantage; tokens of no turn have 0."""
    by_token = torch.zeros(output["completion_ids"].shape, dtype=output["advantages"].dtype)
    for row, (trajectory, of_turns) in enumerate(zip(trajectories, advantages, strict=True)):
        for turn, value in zip(trajectory.turns, of_turns, strict=True):
            by_token[row, turn.start : turn.end] = value
    return {**output, "advantages": by_token.to(output["advantages"].device)}


def answer_logps(trainer: Any, questions: Sequence[AnswerAt]) -> list[float]:
    """Return the mean log-probability that the policy gives to the tokens of each answer.

    Each process asks for itself, so a model that is split over the processes is refused.
    """
    if trainer.backend.splits_parameters:
        raise ConfigError(
            "turn reward info_gain reads the policy in each process for itself, but its parameters are split over the "
            "processes; use a backend that splits nothing, or another turn reward"
        )
    args = trainer.args
    longest = max((len(one.before) + len(one.answer) for one in questions), default=1)
    return mean_answer_logps(
        trainer.accelerator.unwrap_model(trainer.model),
        [(one.before, one.answer) for one in questions],
        max_tokens=args.max_tokens_per_pass or args.per_device_train_batch_size * longest,
        share=args.prefix_sharing != "off" and not args.torch_compile,
        autocast=trainer.accelerator.autocast(),
    )
