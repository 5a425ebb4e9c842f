"""What TRL's trainer hands from its rewards to its loss: the keys of that dict, in one place.

The second of the files that know TRL's trainer from inside (`trl_seam.py` is the first). Used here, and held by `tests/trainer/test_trl_batch.py`:

* `_generate_and_score_completions` returns a dict of a generation batch, and `_compute_loss` reads
  the same keys of a micro-batch: `advantages`, (B,) or (B, T), `completion_mask`, `tool_mask`,
  `prompt_mask`, `num_items_in_batch`, `old_per_token_logps`;
* a row of it is an episode, in the order of `_generate`; what is added (`add_numbers`,
  `with_segments`) is shuffled and split with the others;
* it reads the old policy's log-probabilities before it asks for rewards, where the steps of a batch
  differ in their weights or the engine in its numbers; there it takes NaN for a token that nobody
  could score, and leaves it out of `sampling/sampling_logp_difference`;
* every loss of TRL is 0 for a row whose advantages are 0, in value and in gradient, unless one of
  `NEEDS_EVERY_ROW` or the load-balancing loss (`aux_loss_enabled`) is on;
* every loss is homogeneous in the advantages: twice of them is twice the loss;
* `_compute_loss` appends to `_metrics["train"]["entropy"]` the mean over all tokens of the
  micro-batch, in all processes, and a NaN there is left out of the average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from toolgrpo.signal.advantages import is_dead
from toolgrpo.signal.training_rows import ROW_LOSSES, TOKEN_LOSSES, dead_by_rewards_alone, why_every_row
from toolgrpo.trainer.live_rows import RowChoice, is_live
from toolgrpo.trainer.segmented_rows import SegmentedRows
from toolgrpo.trajectory import Trajectory

Batch = dict[str, Any]


def skips_rows(trainer: Any) -> bool:
    """Return whether rows without an advantage stay out of the training pass."""
    return why_every_row(trainer.args) is None and not trainer.aux_loss_enabled


def in_dead_groups(trainer: Any, combined: Sequence[float | None], n_own: int, group_size: int) -> torch.Tensor:
    """Return which of this process's rows belong to a dead group, by the combined rewards of all
    processes.

    None does where an advantage is no function of the combined reward.
    """
    device = trainer.accelerator.device
    if not dead_by_rewards_alone(trainer.args):
        return torch.zeros(n_own, dtype=torch.bool, device=device)
    dead = [is_dead(combined[start : start + group_size]) for start in range(0, len(combined), group_size)]
    rows = torch.tensor(dead, device=device).repeat_interleave(group_size)
    start = trainer.accelerator.process_index * n_own
    return rows[start : start + n_own]


def clear_dead_groups(batch: Batch, dead: torch.Tensor) -> Batch:
    """Set the advantages of dead groups to exactly 0: TRL's are what rounding left there."""
    return {**batch, "advantages": batch["advantages"].masked_fill(dead.to(batch["advantages"].device), 0.0)}


def reads_old_policy(trainer: Any) -> bool:
    """Return whether TRL reads this training batch with the old policy, and only rows that have an
    advantage matter there.
    """
    args = trainer.args
    if not trainer.model.training or not skips_rows(trainer) or not dead_by_rewards_alone(args):
        return False
    if args.credits().by_turn:
        return False
    misaligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
    return bool(misaligned or (trainer.use_vllm and trainer.vllm_importance_sampling_correction))


def choose_rows_of_old_policy(trainer: Any, dead: torch.Tensor) -> RowChoice:
    """Return which rows the old policy reads: equally many in every process, as TRL takes several
    rows at a time there, and at least one, so that the engine's numbers stay compared with the
    trainer's.
    """
    n_live = (~dead).sum().to(trainer.accelerator.device)
    n_read = max(1, int(trainer.accelerator.gather(n_live).max()))
    read = torch.zeros_like(dead)
    read[torch.argsort(dead.int(), stable=True)[:n_read]] = True
    return RowChoice(read, math.nan)


def fill_old_logps(batch: Batch, choice: RowChoice | None) -> Batch:
    """Return the batch with numbers, where the old policy has not read a row."""
    if choice is None or "old_per_token_logps" not in batch:
        return batch
    unread = ~choice.live.to(batch["advantages"].device)
    if (_live(batch) & unread).any():
        raise RuntimeError(
            "a row that the old policy has not read has an advantage; whatever gives one to a group whose rewards are "
            "all alike must be known to `dead_by_rewards_alone`"
        )
    return {**batch, "old_per_token_logps": batch["old_per_token_logps"].masked_fill(unread.unsqueeze(1), 0.0)}


def settle_denominator(trainer: Any, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """Return the batch as the loss shall see it, and what is skipped of it, over all processes.

    To be called last, when advantages and masks are what they stay: tokens are counted here.
    """
    mask, live = _loss_mask(batch), _live(batch)
    read = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
    counts = torch.stack(
        [
            *(torch.tensor(len(live), device=live.device), live.sum(), mask.sum(), mask[live].sum()),
            *(read.sum(), read[live].sum()),
        ]
    )
    rows, live_rows, tokens, live_tokens, read_tokens, live_read = (
        trainer.accelerator.gather(counts).view(-1, len(counts)).sum(dim=0)
    )
    settled = {**batch, "num_items_in_batch": tokens}
    if trainer.args.loss_denominator == "live":
        if trainer.loss_type in TOKEN_LOSSES:
            settled["num_items_in_batch"] = live_tokens
        elif trainer.loss_type in ROW_LOSSES:
            settled["advantages"] = batch["advantages"] * (rows / live_rows.clamp(min=1))
    left_out = skips_rows(trainer)
    shares = {
        "signal/rows_skipped": 1 - (live_rows / rows).item() if left_out else 0.0,
        "signal/tokens_skipped": 1 - (live_read / read_tokens).item() if left_out else 0.0,
    }
    return settled, shares


def choose_rows(trainer: Any, micro_batch: Batch) -> RowChoice | None:
    """Return which rows of a micro-batch the training pass reads; None stands for all of them."""
    if not trainer.model.training or not skips_rows(trainer):
        return None
    return RowChoice(_live(micro_batch), micro_batch.get("old_per_token_logps", 0.0))


@contextmanager
def mean_entropy_of_live(trainer: Any, micro_batch: Batch, choice: RowChoice | None) -> Iterator[None]:
    """Let the metric `entropy` be the mean over the rows that were read, in all processes.

    In every process alike, for the counts are gathered. A micro-batch without any such row has no
    entropy: NaN, which TRL leaves out.
    """
    yield
    if choice is None:
        return
    mask = _loss_mask(micro_batch)
    counts = torch.stack([mask.sum(), mask[choice.live].sum()])
    tokens, live_tokens = trainer.accelerator.gather(counts).view(-1, 2).sum(dim=0).tolist()
    logged = trainer._metrics["train"]["entropy"]
    logged[-1] = logged[-1] * tokens / live_tokens if live_tokens else math.nan


def advantages_of(output: Mapping[str, Any]) -> list[float]:
    """Return the advantage of each episode; the mean over its sampled tokens where they have their own."""
    advantages = output["advantages"]
    if advantages.dim() > 1:
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
    return [float(value) for value in advantages.tolist()]


def add_numbers(output: dict[str, Any], numbers: Sequence[int]) -> None:
    """Let each row of TRL's batch bear the number of its episode."""
    output["episode_numbers"] = torch.tensor(numbers, device=output["completion_ids"].device)


def numbers_of(inputs: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the episodes in a piece of a batch, or none if they were not added."""
    numbers = inputs.get("episode_numbers")
    return [] if numbers is None else [int(number) for number in numbers.tolist()]


def segments_of(trainer: Any, trajectories: Sequence[Trajectory]) -> SegmentedRows | None:
    """Return where segments begin in these episodes, or None if no process has one of several."""
    accelerator = trainer.accelerator
    several = torch.tensor(any(one.segment_starts for one in trajectories), device=accelerator.device)
    if not accelerator.gather(several).any():
        return None
    return replace(SegmentedRows.of(trajectories, accelerator.device), most=_most(trainer))


def with_segments(output: Batch, segments: SegmentedRows | None) -> Batch:
    """Return TRL's batch with where segments begin in its rows, if they do in any process."""
    return output if segments is None else {**output, "segment_prompts": segments.n_prompts}


def segments_in(trainer: Any, inputs: Mapping[str, Any]) -> SegmentedRows | None:
    """Return where segments begin in a piece of a batch."""
    n_prompts = inputs.get("segment_prompts")
    return None if n_prompts is None else SegmentedRows(n_prompts, _most(trainer))


def _most(trainer: Any) -> Callable[[int], int]:
    accelerator = trainer.accelerator
    return lambda n: int(accelerator.gather(torch.tensor(n, device=accelerator.device)).max())


def tokens_of_row(
    inputs: Mapping[str, Any], row: int, logps: torch.Tensor, entropies: torch.Tensor | None, mask: Sequence[int]
) -> dict[str, list[float | None] | None]:
    """Return what a pass gave for the tokens of one episode; None for those that were not sampled."""

    def own(values: torch.Tensor | None) -> list[float | None] | None:
        if values is None:
            return None
        given = values[row].detach().float().expand(len(mask)) if values.shape[1] == 1 else values[row].detach().float()
        return [round(value, 8) if m else None for value, m in zip(given[: len(mask)].tolist(), mask, strict=True)]

    advantages = inputs["advantages"]
    return {
        "trainer_logprobs": own(logps),
        "entropy": own(entropies),
        "correction": own(inputs.get("importance_sampling_ratio")),
        "advantage": own(advantages) if advantages.dim() > 1 else None,
    }


def live_flags(trainer: Any) -> Any:
    """Return what says of each row of a micro-batch whether it is live, or None where the rows must
    stay where TRL's shuffle put them: all are read, or the loss depends on which stand together.
    """
    if not skips_rows(trainer) or trainer.loss_type not in TOKEN_LOSSES | ROW_LOSSES:
        return None
    return lambda micro_batch: _live(micro_batch).tolist()


def _live(batch: Mapping[str, Any]) -> torch.Tensor:
    return is_live(batch["advantages"], _loss_mask(batch))


def _loss_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
