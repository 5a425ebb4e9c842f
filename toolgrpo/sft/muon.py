"""Muon for small models on a CPU: hidden matrices take orthogonalised steps, everything else takes AdamW's.

`torch.optim.Muon` orthogonalises one matrix at a time in bfloat16, which took seven times as long on a CPU as what is done
here: fp32, matrices of one shape in one batch.

Not covered: distributed or sharded parameters, parameters of more than two dimensions (they get AdamW).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Muon"]

_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration


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
