"""Import TRL's trainers without vLLM and the trackers.

They import these wherever they are installed, which takes seconds, and only TRL's own generation uses vLLM. So they are
imported first here, with stand-ins: what TRL took from vLLM or a tracker is imported when it is used.
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

_TRACKERS = ("wandb", "trackio")


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


class _TrackerLater(ModuleType):
    """A tracker that is imported when it is asked for something else than its run: nobody has begun one before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "run" and sys.modules.get(self.__name__) in (None, self):
            return None
        return getattr(importlib.import_module(self.__name__), name)


def _import_trl() -> None:
    if "trl.trainer.grpo_trainer" in sys.modules:
        return
    stand_ins: dict[str, ModuleType] = {}
    for package in ("vllm", *_TRACKERS):
        spec = None if package in sys.modules else find_spec(package)
        if spec is None or spec.origin is None:  # not installed: wandb's own folder of runs has that name, too
            continue
        of_vllm = {name: _StandIn(name) for name in _TAKEN_BY_TRL}
        stand_ins |= of_vllm if package == "vllm" else {package: _TrackerLater(package)}
        stand_ins[package].__spec__ = spec  # by which TRL finds that it is installed
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("trl.trainer.grpo_trainer")
    finally:
        for name in stand_ins:
            del sys.modules[name]


_import_trl()
GRPOTrainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
SFTTrainer = importlib.import_module("trl.trainer.sft_trainer").SFTTrainer
