"""Touch what PyTorch and Transformers do not promise and the shared pass needs.

Tested with PyTorch 2.13, Transformers 5.19.

* `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu` and its backward: the kernels behind
  PyTorch's own CPU attention, since the public function does not give the log-sum-exp
  (`tests/shared_pass/test_torch_kernels.py` pins them);
* `torch.ops.aten._flash_attention_forward` and its backward: the kernels behind `torch.nn.attention.varlen.varlen_attn`,
  a prototype, whose custom operator costs the host several times a call of these. The same file pins that both ask for the
  same;
* `config._attn_implementation`, by which a Transformers model finds its attention function at every
  call;
* `Variable._execution_engine.queue_callback`, which runs something when the backward pass under way
  is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

cpu_attention_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward


def attention_name(config: Any) -> str:
    """Return the name of the attention function that the model of this config calls."""
    name: str = config._attn_implementation
    return name


def set_attention_name(config: Any, name: str) -> None:
    """Let the model of this config call the attention function registered under `name`."""
    config._attn_implementation = name


def after_backward_pass(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that this is called in is over,
    whatever runs in between.
    """
    Variable._execution_engine.queue_callback(function)
