"""Samples of an engine, and what a model's own forward pass says of their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import torch

from toolgrpo.engines.base import Engine, Sample, SampleRequest
from toolgrpo.engines.decode_batch import processed_logprobs


def sample_together(engine: Engine, *requests: SampleRequest) -> list[Sample]:
    """Open an engine, and have it answer these requests at the same time."""
    return _sampled(engine, lambda: asyncio.gather(*map(engine.sample, requests)))


def sample_in_turn(engine: Engine, *requests: SampleRequest) -> list[Sample]:
    """Open an engine, and have it answer one request after the other."""

    async def ask() -> list[Sample]:
        return [await engine.sample(request) for request in requests]

    return _sampled(engine, ask)


def _sampled(engine: Engine, ask: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
    async def main() -> list[Sample]:
        await engine.open()
        try:
            return await ask()
        finally:
            await engine.close()

    return asyncio.run(main())


def own_logprobs(model: Any, request: SampleRequest, sample: Sample) -> list[float]:
    """Return the log-probabilities that the model gives the sampled tokens in one forward pass."""
    ids = [*request.ids, *sample.ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=model.device)).logits[0, len(request.ids) - 1 : -1].cpu()
    seen = [ids[: len(request.ids) + n] for n in range(len(sample.ids))]
    logprobs = processed_logprobs(logits.float(), request.options, seen)
    found: list[float] = logprobs.gather(1, torch.tensor(sample.ids).unsqueeze(1))[:, 0].tolist()
    return found


def gaps(model: Any, request: SampleRequest, sample: Sample) -> list[float]:
    """Return how far the engine's log-probability of each token is from the model's."""
    assert sample.logprobs is not None
    return [abs(a - b) for a, b in zip(sample.logprobs, own_logprobs(model, request, sample), strict=True)]


def largest_gap(model: Any, requests: Iterable[SampleRequest], samples: Iterable[Sample]) -> float:
    """Return the largest gap of all tokens of these samples; NaN where one is."""
    return float(torch.tensor([gap for one in zip(requests, samples, strict=True) for gap in gaps(model, *one)]).max())
