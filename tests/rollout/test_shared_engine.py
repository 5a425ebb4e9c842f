"""Which weights drew a token, where they change while it is drawn from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from toolgrpo.engines.base import Engine, FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.transformers import ReplicaEngine
from toolgrpo.rollout.ahead import SharedEngine

LENGTH = 120


class Paused:
    """Says how far a request is, as it is told, and answers when it may."""

    name, max_model_len, gives_logprobs = "paused", 100, True
    same_numbers_as_trainer, takes_weights_while_open = False, True

    def __init__(self) -> None:
        self.n_drawn = 0
        self.may_go = asyncio.Event()

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def shutdown(self) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    async def sample(self, request: SampleRequest) -> Sample:
        await self.may_go.wait()
        return Sample((1,) * 10, (-1.0,) * 10, FinishReason.LENGTH)


class Counting(Paused):
    def n_drawn_before_load(self, request: SampleRequest) -> int:
        return self.n_drawn


def drawn(engine: Paused, *loads: tuple[int, int]) -> Sample:
    """One request that is so many tokens far when the weights of a step come."""

    async def main() -> Sample:
        shared = SharedEngine(engine)
        shared.load_weights((), step=3)
        task = asyncio.create_task(shared.sample(SampleRequest((1,), 10, (), SamplingOptions())))
        await asyncio.sleep(0)
        for n_drawn, step in loads:
            engine.n_drawn = n_drawn
            shared.load_weights((), step=step)
        engine.may_go.set()
        return await task

    return asyncio.run(main())


def test_a_sample_knows_from_which_token_on_later_weights_drew_it() -> None:
    assert (drawn(Counting()).weights, drawn(Counting()).taken_over) == ((3, 3), ())
    sample = drawn(Counting(), (4, 4), (7, 5))
    assert (sample.weights, sample.taken_over) == ((3, 5), ((4, 4), (7, 5)))


def test_of_weights_that_drew_nothing_nothing_is_said() -> None:
    waited = drawn(Counting(), (0, 4), (0, 5))
    assert (waited.weights, waited.taken_over) == ((5, 5), ())
    twice = drawn(Counting(), (6, 4), (6, 5), (10, 6))
    assert (twice.weights, twice.taken_over) == ((3, 5), ((6, 5),)), "at its end it had all of its tokens"


def test_every_token_is_as_probable_as_the_weights_that_it_names_make_it(tiny_qwen3: Any) -> None:
    """Of a replica, which goes on with the caches of the weights before, so that it has exactly the numbers of its first
    ones alone; but those it has up to where others took over, and no further. vLLM: engines/test_vllm_seam.py."""
    check_every_token(ReplicaEngine(tiny_qwen3(0), max_model_len=512), tiny_qwen3, is_exact=False)


def check_every_token(engine: Engine, tiny_qwen3: Any, *, is_exact: bool) -> None:
    """Requests of many lengths, over which three more policies come."""
    models = [tiny_qwen3(number) for number in range(4)]
    shared = SharedEngine(engine)
    rng = random.Random(0)
    requests = [SampleRequest((n + 1, 2, 3), rng.randrange(20, LENGTH), (), SamplingOptions()) for n in range(12)]
    late = [SampleRequest((n + 50,), LENGTH, (), SamplingOptions()) for n in range(4)]

    async def main() -> list[Sample]:
        shared.load_weights(models[0].named_parameters(), step=0)
        await shared.open()
        try:
            async with asyncio.timeout(300):
                tasks = [asyncio.create_task(shared.sample(request)) for request in requests]
                for step, model in enumerate(models[1:], 1):
                    await shared.sample(SampleRequest((9, 9), 15, (), SamplingOptions()))  # so far are the others, too
                    shared.load_weights(model.named_parameters(), step=step)
                    if step == 2:
                        tasks += [asyncio.create_task(shared.sample(request)) for request in late]
                return list(await asyncio.gather(*tasks))
        finally:
            await shared.close()

    samples = asyncio.run(main())
    assert max(len(sample.taken_over) for sample in samples) == 3
    for request, sample in zip([*requests, *late], samples, strict=True):
        ids = torch.tensor([[*request.ids, *sample.ids]])
        with torch.no_grad():
            by_model = [model(ids).logits[0, len(request.ids) - 1 : -1].log_softmax(-1) for model in models]
        assert sample.weights is not None and sample.logprobs is not None
        changes = [(0, sample.weights[0]), *sample.taken_over]
        assert sample.weights[1] == changes[-1][1]
        for place, token in enumerate(sample.ids):
            number, step = [(number, step) for number, (first, step) in enumerate(changes) if first <= place][-1]
            if number == 0 or is_exact:
                expected = float(by_model[step][place, token])
                assert sample.logprobs[place] == pytest.approx(expected, abs=1e-3), (place, step)
        if sample.taken_over:
            first = sample.taken_over[0][0]
            before = float(by_model[sample.weights[0]][first, sample.ids[first]])
            assert sample.logprobs[first] != pytest.approx(before, abs=1e-3), "others drew it"
