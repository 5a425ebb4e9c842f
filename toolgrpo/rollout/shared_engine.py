"""One engine for several rollouts at a time, whose weights change while they run.

Invariants: the engine is open from the first rollout that opens it until the last one has closed it;
each sample bears the steps whose weights drew its first and its last token; all of it happens on one
event loop, so weights change between two steps of the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from toolgrpo.engines.base import Engine, Sample, SampleRequest
from toolgrpo.rollout.busy_time import BusyTime

if TYPE_CHECKING:
    import torch

__all__ = ["SharedEngine"]


class SharedEngine:
    """An engine of an engine, for rollouts that each open and close it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._users = 0
        self._opening = asyncio.Lock()
        self._step = 0  # of the weights
        self._busy = BusyTime(time.monotonic)

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def gives_logprobs(self) -> bool:
        return self._engine.gives_logprobs

    @property
    def same_numbers_as_trainer(self) -> bool:
        return self._engine.same_numbers_as_trainer

    @property
    def busy_s(self) -> float:
        """For how long it has had work so far."""
        return self._busy.total_s

    async def open(self) -> None:
        async with self._opening:
            if self._users == 0:
                await self._engine.open()
            self._users += 1

    async def sample(self, request: SampleRequest) -> Sample:
        first = self._step
        with self._busy:
            sample = await self._engine.sample(request)
        return replace(sample, weights=(first, self._step))

    async def close(self) -> None:
        async with self._opening:
            self._users -= 1
            if self._users == 0:
                await self._engine.close()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], step: int = 0) -> None:
        """Go on with these weights, of a step, also in what is being drawn."""
        self._engine.load_weights(weights)
        self._step = step

    def shutdown(self) -> None:
        """Do nothing: the engine belongs to whoever made it."""
