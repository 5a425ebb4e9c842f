"""Import TRL's `GRPOTrainer` without vLLM.

`trl.trainer.grpo_trainer` imports vLLM wherever it is installed, which takes seconds, and only TRL's own generation uses
it. So it is imported first here, with stand-ins for vLLM's modules: what TRL took from them imports vLLM when it is used.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TAKEN_BY_TRL = (  # modules of vLLM that `trl.generation` imports from
    "vllm",
    "vllm.sampling_params",
    "vllm.utils.network_utils",
    "vllm.distributed.weight_transfer.nccl_common",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.distributed.weight_transfer.packed_tensor",
)


class _Later:
    """A function or class of vLLM that is imported when it is called, or asked for one of its own."""

    def __init__(self, module: str, name: str) -> None:
        self._where = module, name

    def _import(self) -> Any:
        module, name = self._where
        return getattr(importlib.import_module(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._import()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._import(), name)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self.__name__, name)


def _import_trl_without_vllm() -> None:
    spec = None if "vllm" in sys.modules or "trl.trainer.grpo_trainer" in sys.modules else find_spec("vllm")
    if spec is None:
        return
    stand_ins = {name: _StandIn(name) for name in _TAKEN_BY_TRL}
    stand_ins["vllm"].__spec__ = spec  # by which TRL finds that it is installed
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("trl.trainer.grpo_trainer")
    finally:
        for name in stand_ins:
            del sys.modules[name]


_import_trl_without_vllm()
GRPOTrainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
