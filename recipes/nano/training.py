"""The supervised training that makes nano: batches, loss, optimizer and loop.

The loss runs on the prefix-shared pass of `toolgrpo.shared_pass`: the text of the tools is computed once for all
questions of a batch. Where that pass steps aside, the padded one runs.

Muon gives hidden matrices orthogonalised steps, and everything else AdamW's. `torch.optim.Muon` orthogonalises one
matrix at a time in bfloat16, which took seven times as long on a CPU as fp32 with matrices of one shape in one batch.
Schedules are functions of the step, so that a run is reproducible.

Not covered: distributed or sharded parameters, parameters of more than two dimensions (they get AdamW).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolgrpo.sft.encoder import Example
from toolgrpo.shared_pass.scoring import SharedPass
from toolgrpo.trainer.trl.trainer import add_fused_head

_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded."""

    ids: torch.Tensor  # [B, L]
    attention_mask: torch.Tensor  # [B, L] 1 where there is a token
    loss_mask: torch.Tensor  # [B, L] bool; the first token has no loss, nothing predicts it

    @property
    def n_targets(self) -> int:
        """How many tokens the loss is taken on."""
        return int(self.loss_mask.sum())


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), pad_id)
    attention_mask, loss_mask = torch.zeros((2, len(examples), width), dtype=torch.long)
    for index, example in enumerate(examples):
        n = len(example.ids)
        ids[index, :n] = torch.tensor(example.ids)
        attention_mask[index, :n] = 1
        loss_mask[index, 1:n] = torch.tensor(example.mask[1:])
    return Batch(ids, attention_mask, loss_mask.bool())


class SupervisedLoss:
    """Called with a batch, it gives the mean loss over the loss tokens of the batch. It adds TRL's fused head to the model."""

    def __init__(self, model: Any) -> None:
        add_fused_head(model)
        self._model = model
        self._shared = SharedPass()

    def __call__(self, batch: Batch) -> torch.Tensor:
        scored = self._shared.score(
            self._model, batch.ids, batch.attention_mask, scored_mask=batch.loss_mask, unwrapped=self._model
        )
        if scored is not None:
            return -scored.logps.sum() / batch.n_targets
        output = self._model(
            input_ids=batch.ids,
            attention_mask=batch.attention_mask,
            labels=batch.ids.masked_fill(~batch.loss_mask, -100),
            fused_lm_head=True,
        )
        loss: torch.Tensor = -output.log_probs.sum() / batch.n_targets
        return loss


class Muon(torch.optim.Optimizer):
    """One optimizer over all parameters; `lr` is the matrices', `adam_lr` that of embeddings, norms and biases."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        lr: float,
        adam_lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        iterations: int = 5,
    ) -> None:
        by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        rest: list[torch.nn.Parameter] = []
        for name, parameter in named_parameters:
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                rest.append(parameter)
        groups: list[dict[str, Any]] = [{"params": same, "lr": lr, "matrices": True} for same in by_shape.values()]
        groups.append({"params": rest, "lr": adam_lr, "matrices": False})
        super().__init__(groups, {"momentum": momentum, "betas": betas, "iterations": iterations})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure is used
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["matrices"]:
                self._orthogonal_step(parameters, group)
            elif parameters:
                self._adam_step(parameters, group)

    def _orthogonal_step(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            average.lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(average, group["momentum"]))
        rows, columns = updates[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        steps = orthogonalised(torch.stack(updates), group["iterations"])
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.add_(step, alpha=-group["lr"] * scale)

    def _adam_step(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if not state:
                state.update(t=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["t"] += 1
            state["mean"].lerp_(parameter.grad, 1 - beta1)
            state["square"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
            root = (state["square"] / (1 - beta2 ** state["t"])).sqrt_().add_(1e-8)
            parameter.addcdiv_(state["mean"] / (1 - beta1 ** state["t"]), root, value=-group["lr"])


def orthogonalised(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
    """Each matrix of a batch with its singular values brought near 1, by Newton-Schulz."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


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
