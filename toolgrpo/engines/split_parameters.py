"""The transformers engine for parameters that are split over processes (FSDP, DeepSpeed ZeRO-3).

Each process keeps a whole copy of the model beside its part, and `load_weights` fills it. So every process decodes on its
own, and none waits for another inside a rollout. The copy takes the memory of one whole model in each process: where that
is too much, `vllm serve` on other devices is the engine to use.

Not covered: buffers that training changes (none of the decoder models has such); quantised models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from toolgrpo.engines.transformers import TransformersEngine
from toolgrpo.errors import EngineError

__all__ = ["ReplicaEngine"]


class ReplicaEngine(TransformersEngine):
    """The `transformers` engine over a model of its own."""

    name = "replica"
    same_numbers_as_trainer = False

    def __init__(self, replica: Any, *, max_model_len: int | None = None, max_rows: int = 64, seed: int = 0) -> None:
        super().__init__(lambda: replica, max_model_len=max_model_len, max_rows=max_rows, seed=seed)
        self._replica = replica.eval()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every parameter, walking `weights` to the end: gathering them is collective."""
        own = dict(self._replica.named_parameters())
        missing = set(own)
        for name, tensor in weights:
            if name in own:
                own[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineError(
                f"the trainer gave no weights for {len(missing)} of the model's parameters, e.g. {min(missing)!r}; its "
                f"copy for generation would be stale. Use --engine vllm_server, and report this."
            )
