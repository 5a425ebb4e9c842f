"""One engine for several rollouts at a time, whose weights change while they run.

Invariants: the engine is open from the first rollout that opens it until the last one has closed it;
each sample bears the steps whose weights drew its tokens; all of it happens on one event loop, so
weights change between two steps of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from toolgrpo.engines.base import CountsTokens, Engine, Sample, SampleRequest

if TYPE_CHECKING:
    import torch


@dataclass(eq=False, slots=True)
class _Open:
    """A request, the step of the weights that it began with, and those that took over: from which token on, if known."""

    request: SampleRequest
    step: int
    taken_over: list[tuple[int | None, int]] = field(default_factory=list)

    def with_weights(self, sample: Sample) -> Sample:
        by_token = {0: self.step}  # of several that took over at one token, the last drew it
        for token, step in self.taken_over:
            if token is None:
                return replace(sample, weights=(self.step, self.taken_over[-1][1]))
            if token < len(sample.ids):
                by_token[token] = step
        (_, first), *later = by_token.items()
        return replace(sample, weights=(first, by_token[max(by_token)]), taken_over=tuple(later))


class SharedEngine:
    """An engine of an engine, for rollouts that each open and close it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._users = 0
        self._opening = asyncio.Lock()
        self._step = 0  # of the weights
        self._open: list[_Open] = []

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
    def takes_weights_while_open(self) -> bool:
        return self._engine.takes_weights_while_open

    async def open(self) -> None:
        async with self._opening:
            if self._users == 0:
                await self._engine.open()
            self._users += 1

    async def sample(self, request: SampleRequest) -> Sample:
        one = _Open(request, self._step)
        self._open.append(one)
        try:
            sample = await self._engine.sample(request)
        finally:
            self._open.remove(one)
        return one.with_weights(sample)

    async def close(self) -> None:
        async with self._opening:
            self._users -= 1
            if self._users == 0:
                await self._engine.close()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], step: int = 0) -> None:
        """Go on with these weights, of a step, also in what is being drawn."""
        self._engine.load_weights(weights)
        self._step = step
        counts = self._engine if isinstance(self._engine, CountsTokens) else None
        for one in self._open:
            one.taken_over.append((None if counts is None else counts.n_drawn_before_load(one.request), step))

    def shutdown(self) -> None:
        """Do nothing: the engine belongs to whoever made it."""
