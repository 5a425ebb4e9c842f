"""What toolgrpo changes in the batches that TRL makes: rewards, advantages and masks.

A third file beside `trl_seam.py` and `trl_batch.py` that touches what is private in TRL
(`tests/trainer/test_trl_signal.py` fails with a sentence when one of these changes):

* `GRPOTrainer._calculate_rewards` gives the rewards of all processes, an episode a row; one with NaN
  alone leaves mean and standard deviation, and its advantage is 0 (`without_dropped`). TRL warns of
  such rows with all that they hold, through the logger of its module (`quiet_about_unscored`);
* what `_generate_and_score_completions` returns has `advantages`, `completion_mask` and `tool_mask`;
  whatever else stands in it is shuffled and cut with it (`with_advantages`);
* `_compute_loss` takes `advantages` of (B,) or (B, T), one for each completion token, and every loss
  of `LOSSES_BY_TOKEN` weighs each token by its own (`with_turn_advantages`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from toolgrpo.drops import DropEpisode
from toolgrpo.rollout.batch import Grade
from toolgrpo.signal.dropped import grade_of
from toolgrpo.signal.shaping import Member
from toolgrpo.trajectory import Trajectory

T = TypeVar("T")


def own_part(trainer: Any, of_all: Sequence[T], n_own: int) -> list[T]:
    """Return the part of this process, of one value for each row of all processes."""
    start = trainer.accelerator.process_index * n_own
    return list(of_all[start : start + n_own])


def own_grades(
    trainer: Any,
    rewards_per_func: torch.Tensor,
    trajectories: Sequence[Trajectory],
    dropped_by_rewards: Mapping[int, DropEpisode],
) -> list[Grade]:
    """Return what this process's episodes are worth,
    of the rewards that TRL has gathered from all processes.
    """
    start = trainer.accelerator.process_index * len(trajectories)
    own = rewards_per_func[start : start + len(trajectories)]
    totals = (own * trainer.reward_weights.to(own.device)).nansum(dim=1).tolist()
    names = trainer.reward_func_names
    return [
        grade_of(
            trajectory,
            {name: None if math.isnan(value) else value for name, value in zip(names, values, strict=True)},
            total,
            dropped_by_rewards.get(place),
        )
        for place, (trajectory, values, total) in enumerate(zip(trajectories, own.tolist(), totals, strict=True))
    ]


@contextmanager
def quiet_about_unscored() -> Iterator[None]:
    """Keep TRL from printing whole rows, tokens and all, of episodes that are dropped and counted."""

    def wanted(record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in str(record.msg)

    logger = logging.getLogger("trl.trainer.grpo_trainer")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def without_dropped(rewards_per_func: torch.Tensor, members: Sequence[Member]) -> torch.Tensor:
    """Return the rewards of all processes with none for the episodes that were dropped."""
    dropped = [place for place, member in enumerate(members) if member.drop is not None]
    if not dropped:
        return rewards_per_func
    kept = rewards_per_func.clone()
    kept[dropped] = torch.nan
    return kept


def with_advantages(
    trainer: Any, output: dict[str, Any], members: Sequence[Member], advantages: Sequence[float] | None
) -> dict[str, Any]:
    """Return TRL's batch with these advantages, of all processes, in place of its own (None: keep them),
    and with no token to train on in episodes that were dropped; how many are left is counted later.
    """
    n_own = len(output["advantages"])
    changed = dict(output)
    if advantages is not None:
        changed["advantages"] = torch.tensor(own_part(trainer, advantages, n_own)).to(output["advantages"])
    if any(member.drop is not None for member in members):
        own = own_part(trainer, members, n_own)
        kept = torch.tensor([member.drop is None for member in own], device=output["tool_mask"].device)
        changed["tool_mask"] = output["tool_mask"] * kept.unsqueeze(1)
    return changed


def with_turn_advantages(
    output: dict[str, Any], trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return TRL's batch with each sampled token's turn's advantage; tokens of no turn have 0."""
    by_token = torch.zeros(output["completion_ids"].shape, dtype=output["advantages"].dtype)
    for row, (trajectory, of_turns) in enumerate(zip(trajectories, advantages, strict=True)):
        for turn, value in zip(trajectory.turns, of_turns, strict=True):
            by_token[row, turn.start : turn.end] = value
    return {**output, "advantages": by_token.to(output["advantages"].device)}
