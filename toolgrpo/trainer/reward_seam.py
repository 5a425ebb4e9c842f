"""Ask TRL's rewards about some episodes of this process, while others still run. Tested with TRL
1.16.0.

What is private and used, beside what `trl_seam.py` lists:

* `GRPOTrainer._calculate_rewards(inputs, prompts, completions, completion_ids_list)` asks all
  reward functions, async ones at once, reward models with their tokenizers, and gives NaN for None.
  It is called on a bare `GRPOTrainer` with the trainer's attributes, which has some of the functions
  and collects what they log by itself;
* `trl.trainer.grpo_trainer.gather`, with which it ends: a collective call, left out there
  (`keep_gathers_apart`) and made once for the whole batch by `answers_of`;
* `GRPOTrainer._pending_extra_logs` and `_pending_metrics` collect what rewards log until the batch
  is scored;
* `GRPOTrainer._metrics[mode]["reward"]` is the mean reward of what is trained on.
"""

from __future__ import annotations

import contextvars
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import is_async_callable

from toolgrpo.drops import DropEpisode
from toolgrpo.errors import ConfigError
from toolgrpo.evaluation.grading import success_at
from toolgrpo.rewards.base import Reward
from toolgrpo.rewards.unscored import noted_drops
from toolgrpo.rewards.withdrawal import asked_in_thread
from toolgrpo.rollout.batch import Row
from toolgrpo.rollout.held_time import timers_held
from toolgrpo.trainer import trl_jobs
from toolgrpo.trainer.drawn_batches import Asked, DrawnBatch, DrawnBatches, RewardRule, row_order
from toolgrpo.trainer.generation_output import GenerationOutput
from toolgrpo.trainer.trl_seam import has_reward_model, log_metrics, mode_of
from toolgrpo.trainer.trl_signal import quiet_about_unscored
from toolgrpo.trajectory import Trajectory

_apart: contextvars.ContextVar[bool] = contextvars.ContextVar("gathers_kept_apart", default=False)
_gather = grpo_trainer.gather


def _gather_unless_apart(tensor: Any) -> Any:
    return tensor if _apart.get() else _gather(tensor)


@contextmanager
def keep_gathers_apart() -> Iterator[None]:
    """Let TRL's rewards be asked in the block without a collective call."""
    grpo_trainer.gather = _gather_unless_apart
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


async def ask_rewards(trainer: Any, rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> Asked:
    """Ask every reward about these episodes, as TRL would.

    Plain functions and models are asked here, one after the other, and no timer counts it; async
    ones in a thread, so that they wait beside the rollout and other groups.
    """
    waiting = [number for number, reward in enumerate(trainer.reward_funcs) if _only_waits(reward)]
    plain = [number for number in range(len(trainer.reward_funcs)) if number not in waiting]
    answers: dict[int, tuple[float, ...]] = {}
    columns: dict[str, tuple[Any, ...]] = {}
    metrics: dict[str, tuple[float, ...]] = {}
    drops: dict[int, DropEpisode] = {}
    for numbers in (plain, waiting):
        if not numbers:
            continue
        ask = partial(_ask, trainer, numbers, rows, trajectories)
        if numbers is plain:
            with timers_held():
                asked = ask()
        else:
            asked = await asked_in_thread(ask)
        answers.update(zip(numbers, zip(*asked.values, strict=True), strict=True))
        columns.update(asked.columns)
        metrics.update(asked.metrics)
        drops = {**asked.drops, **drops}
    in_order = [answers[number] for number in range(len(trainer.reward_funcs))]
    values = [
        (math.nan,) * len(of) if place in drops or trajectories[place].dropped is not None else of
        for place, of in enumerate(zip(*in_order, strict=True))
    ]
    with timers_held():
        turns = tuple(trainer.turn_rewards(rows, trajectories)) if trainer.args.credits().by_turn else ()
    return Asked(tuple(values), columns, metrics, drops, turns)


def answers_of(trainer: Any, drawn: DrawnBatch) -> torch.Tensor:
    """Return what `_calculate_rewards` would of a drawn batch: the rewards of all processes' rows.

    What the rewards have logged goes to TRL with it.
    """
    for name, values in drawn.columns.items():
        trainer._pending_extra_logs[name].extend(values)
    for name, numbers in drawn.logged.items():
        trainer._pending_metrics[name].extend(numbers)
    device = trainer.accelerator.device
    everything: torch.Tensor = _gather(
        torch.tensor([list(of) for of in drawn.values], dtype=torch.float32, device=device)
    )
    return everything


def log_drawn(trainer: Any, drawn: DrawnBatch) -> None:
    """Let `reward` be the mean of everything drawn; TRL's, of what is trained on, stands beside it."""
    collected = trainer._metrics[mode_of(trainer)]
    collected["reward_trained"].append(collected["reward"].pop())
    collected["reward"].append(drawn.reward)
    log_metrics(trainer, drawn.metrics)


def open_drawing(trainer: Any) -> DrawnBatches:
    """Return what draws the batches of this trainer, or say why nothing can."""
    args, rows = trainer.args, trainer.train_dataset
    if trainer.backend.splits_parameters and any(isinstance(one, torch.nn.Module) for one in trainer.reward_funcs):
        raise ConfigError(
            "dynamic_sampling asks rewards when a group ends, in each process for itself, but the "
            "reward model is split over the processes; use a reward function, or a backend that splits nothing"
        )
    rule = RewardRule(
        names=tuple(trainer.reward_func_names),
        weights=tuple(trainer.reward_weights.tolist()),
        succeeded=success_at(args.success_threshold),
        shaping=args.shaping(),
        credit=args.credits(),
    )
    return DrawnBatches(
        admission=args.admission,
        order=row_order(rows, partial(epoch_order, trainer)),
        rule=rule,
        row_of=lambda number: trainer.train_sampler.data_source[number],
        group_size=args.num_generations,
        n_processes=trainer.accelerator.num_processes,
        process=trainer.accelerator.process_index,
    )


def epoch_order(trainer: Any, n_rows: int, epoch: int) -> list[int]:
    """Return the order in which TRL's sampler draws the rows of an epoch."""
    if not trainer.shuffle_dataset:
        return list(range(n_rows))
    generator = torch.Generator().manual_seed(trainer.args.seed)
    for _ in range(epoch):
        torch.randperm(n_rows, generator=generator)
    return torch.randperm(n_rows, generator=generator).tolist()


def _only_waits(reward: Any) -> bool:
    inner = getattr(reward, "__wrapped__", reward)
    if isinstance(inner, Reward):
        return inner.is_async
    return bool(is_async_callable(reward))


def _ask(trainer: Any, numbers: Sequence[int], rows: Sequence[Row], trajectories: Sequence[Trajectory]) -> Asked:
    """Ask some of the rewards through TRL's own method."""
    generated = GenerationOutput.from_trajectories(trajectories, trainer.processing_class.pad_token_id)
    inputs = [{**row, "trajectories": trajectory} for row, trajectory in zip(rows, trajectories, strict=True)]
    prompts: list[Any] = [row["prompt"] for row in rows]
    if has_reward_model(trainer):
        prompts = trl_jobs.as_conversations(prompts)  # it reads the whole conversation
    view = GRPOTrainer.__new__(GRPOTrainer)  # not a copy of ours, which gives its engine back when it goes
    vars(view).update(vars(trainer))
    view.reward_funcs = [trainer.reward_funcs[number] for number in numbers]
    view.reward_processing_classes = [trainer.reward_processing_classes[number] for number in numbers]
    view.reward_func_names = [trainer.reward_func_names[number] for number in numbers]
    view._pending_extra_logs, view._pending_metrics = defaultdict(list), defaultdict(list)
    with (
        trl_jobs.point_to_messages(prompts),
        keep_gathers_apart(),
        quiet_about_unscored(),
        noted_drops() as drops,
    ):
        values = GRPOTrainer._calculate_rewards(view, inputs, prompts, generated.completions, generated.completion_ids)
    return Asked(
        values=tuple(map(tuple, values.tolist())),
        columns={name: tuple(of) for name, of in view._pending_extra_logs.items() if len(of) == len(rows)},
        metrics={name: tuple(of) for name, of in view._pending_metrics.items()},
        drops=dict(drops),
    )
