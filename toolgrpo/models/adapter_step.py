"""A linear layer with its LoRA adapter as one step of autograd, for models in 16 bits.

PEFT keeps an adapter in 32 bits, and copies what each layer reads and adds to that width: on a CPU these copies took
longer than the products. Here the adapter is rounded to the layer's dtype for the products, as autocast would do and as
an engine has it once it is merged; it is trained in 32 bits all the same. Whatever is not a plain adapter over a plain
layer runs as PEFT has it.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import nn
from torch.nn import functional


def join_adapters(model: Any) -> None:
    """Let the plain LoRA layers of a model, whose parameters are whole in this process, compute in one step."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.__class__ = JoinedLinear


def may_join(model: Any) -> bool:
    """Return whether `join_adapters` leaves no layer to PEFT in 16 bits."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return all(isinstance(layer, Linear) and _plain_adapter(layer) is not None for layer in layers)


def _plain_adapter(layer: Any) -> str | None:
    """Return the name of the one plain adapter over a plain layer, None if it is anything else."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.lora_variant or type(layer.base_layer) is not nn.Linear:
        return None
    (name,) = names
    has_bias = layer.lora_A[name].bias is not None or layer.lora_B[name].bias is not None
    drops = not isinstance(layer.lora_dropout[name], nn.Identity)
    trains_base = any(one.requires_grad for one in layer.base_layer.parameters())  # its bias alone, perhaps
    return None if has_bias or drops or trains_base else name


class JoinedLinear(Linear):  # type: ignore[misc]  # PEFT ships no types for it
    """PEFT's layer, which takes the short way where it may."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = _plain_adapter(self)
        if args or kwargs or name is None or self.disable_adapters or self.merged or not self._is_of_16_bits(x):
            whole: torch.Tensor = super().forward(x, *args, **kwargs)
            return whole
        base, down, up = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
        joined: torch.Tensor = AdapterStep.apply(x, base.weight, base.bias, down, up, self.scaling[name])  # type: ignore[no-untyped-call]
        return joined

    def _is_of_16_bits(self, x: torch.Tensor) -> bool:
        """In 32 bits nothing would be saved, and sums would be rounded in another order."""
        device, dtype = x.device.type, self.base_layer.weight.dtype
        computes_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        return bool(x.dtype == dtype == computes_in and dtype.itemsize == 2)


class AdapterStep(torch.autograd.Function):
    """`x W' + b + scale * (x A') B'`, in the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        down, up = down.to(x.dtype), (up * scale).to(x.dtype)
        inner = rows @ down.t()
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scale, ctx.shape = scale, x.shape
        return functional.linear(rows, weight, bias).addmm_(inner, up.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, down, up, inner = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        of_inner = grad @ up
        of_x = (grad @ weight).addmm_(of_inner, down).view(ctx.shape) if ctx.needs_input_grad[0] else None
        of_down = (of_inner.t() @ rows).to(torch.promote_types(grad.dtype, torch.float32))
        of_up = (grad.t() @ inner).to(of_down.dtype) * ctx.scale
        return of_x, None, None, of_down, of_up, None
