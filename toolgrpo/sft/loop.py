"""The training loop: batches in, a trained model out. Schedules are functions of the step, so that a run is reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from toolgrpo.sft.batches import Batch
from toolgrpo.sft.loss import SupervisedLoss

__all__ = ["train", "warmup_then_decay"]


def warmup_then_decay(step: int, steps: int, *, warmup: int, decay: float) -> float:
    """The factor on the learning rate: a linear rise over `warmup` steps, then 1, and a linear fall over the last `decay` share."""
    rise = min(1.0, (step + 1) / max(1, warmup))
    fall = min(1.0, (steps - step) / max(1.0, decay * steps))
    return rise * fall


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    *,
    schedule: Callable[[int], float],
    max_grad_norm: float = 1.0,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """One optimizer step per group of batches, whose tokens weigh the same; `schedule(step)` scales every learning rate."""
    loss_of = SupervisedLoss(model)
    base_rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step, batches in enumerate(steps):
        for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
            group["lr"] = rate * schedule(step)
        optimizer.zero_grad(set_to_none=True)
        loss = _backward(loss_of, batches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss)
    model.eval()


def _backward(loss_of: SupervisedLoss, batches: Sequence[Batch]) -> float:
    """Add up the gradients of the mean loss over all tokens of these batches; one batch's activations live at a time."""
    n_targets = sum(batch.n_targets for batch in batches)
    total = 0.0
    for batch in batches:
        loss = loss_of(batch) * (batch.n_targets / n_targets)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        total += loss.item()
    return total
