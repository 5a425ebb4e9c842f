"""Which weights drew a token, where they change while it is drawn from."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from toolgrpo.engines.base import Engine, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.transformers import ReplicaEngine
from toolgrpo.rollout.ahead import SharedEngine

LENGTH = 120


def test_every_token_is_as_probable_as_the_weights_of_its_time_make_it(tiny_qwen3: Any) -> None:
    """Of a replica, which goes on with the caches of the weights before, so that it has exactly the numbers of its first
    ones alone. vLLM: engines/test_vllm_seam.py."""
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
    n_changed = 0
    for request, sample in zip([*requests, *late], samples, strict=True):
        ids = torch.tensor([[*request.ids, *sample.ids]])
        with torch.no_grad():
            by_model = [model(ids).logits[0, len(request.ids) - 1 : -1].log_softmax(-1) for model in models]
        assert sample.weights is not None and sample.logprobs is not None
        first = step = sample.weights[0]
        for place, token in enumerate(sample.ids):
            while sample.logprobs[place] != pytest.approx(float(by_model[step][place, token]), abs=1e-3):
                step += 1  # from here on others draw
                if not is_exact:
                    break
                assert step <= sample.weights[1], (place, step)
            if step > first and not is_exact:
                break
        assert step <= sample.weights[1]
        n_changed += step > first
    assert n_changed >= 12, "weights change while requests are open"
