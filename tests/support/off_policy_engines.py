"""Engines whose tokens come from another policy than the trainer's, on a CPU: what a GPU's bf16 and an
overlap of training and rollouts do to log-probabilities.

Both decode really, with a copy of the model. Importing this imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.transformers import ReplicaEngine


class RoundedEngine(ReplicaEngine):
    """Draws from the trainer's weights, and gives its log-probabilities in bf16."""

    async def sample(self, request: SampleRequest) -> Sample:
        sample = await super().sample(request)
        assert sample.logprobs is not None
        rounded = torch.tensor(sample.logprobs, dtype=torch.float64).to(torch.bfloat16).tolist()
        return replace(sample, logprobs=tuple(rounded))


class LateEngine(ReplicaEngine):
    """Draws from the weights before those that it was given last."""

    def __init__(self, replica: Any, *, seed: int = 0) -> None:
        super().__init__(replica, seed=seed)
        self._newest: list[tuple[str, torch.Tensor]] | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        newest = [(name, tensor.detach().clone()) for name, tensor in weights]
        super().load_weights(newest if self._newest is None else self._newest)
        self._newest = newest
