"""Parts of `gpu_proof.py` about engines, on random weights of a 1.5B model's shape."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _gpu_place import Figure, Place, model_of_shape

from tests.support.ports import free_port
from tests.support.vllm_process import VLLMServerProcess
from toolgrpo.engines.base import Engine, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.server_transfer import TransferWeights, choose_weight_route
from toolgrpo.engines.transformers import TransformersEngine
from toolgrpo.engines.vllm_options import ServerOptions
from toolgrpo.engines.vllm_server import VLLMServerEngine

GIB = 2**30
SAME = 1e-3  # log-probabilities of the same weights in the same precision, twice through one engine
ROUNDING_FP32, ROUNDING_BF16 = 1e-3, 0.1  # of two implementations: the most in fp32, the mean in bf16


def difference(place: Place, *, bits: int) -> Iterator[Figure]:
    """How far the engine's log-probabilities are from the model's own, by how far into the sequence they stand."""
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    ends, rows = ((8, 16, 32), 4) if place.tiny else ((256, 1024, 2048, 4096), 8)
    model = model_of_shape(place, dtype).eval()
    engine = _engine(place, model, max_model_len=64 + ends[-1])
    try:
        requests = [_request(seed, ends[-1]) for seed in range(rows)]
        samples = _sampled(engine, requests)
    finally:
        engine.shutdown()
    apart = []
    for request, sample in zip(requests, samples, strict=True):
        assert sample.logprobs is not None
        own = _own_logprobs(model, [*request.ids, *sample.ids], len(request.ids))
        apart.append((own - torch.tensor(sample.logprobs)).abs())
    start = 0
    for end in ends:
        part = torch.stack(apart)[:, start:end]
        where = f"tokens {start} to {end}"
        mean_bound = ROUNDING_BF16 if bits == 16 else None
        yield Figure(f"{where}: differ at the mean by", float(part.mean()), at_most=mean_bound)
        yield Figure(f"{where}: at most by", float(part.max()), at_most=ROUNDING_FP32 if bits == 32 else None)
        start = end


def sleep(place: Place) -> Iterator[Figure]:
    """Memory that colocated vLLM gives back between rollouts, and that it says the same when it woke."""
    model = model_of_shape(place, torch.bfloat16).eval()
    engine = _engine(place, model, max_model_len=1024, sleeps=True)
    request = SampleRequest(tuple(range(11, 75)), 64, (), SamplingOptions(temperature=0.0))

    async def used_while_open() -> tuple[float, Sample]:
        await engine.open()
        try:
            return _used_gib(), await engine.sample(request)
        finally:
            await engine.close()

    try:
        awake, first = asyncio.run(used_while_open())
        asleep = _used_gib()
        engine.load_weights(model.named_parameters())
        again, second = asyncio.run(used_while_open())
    finally:
        engine.shutdown()
    yield Figure("memory in use while it generates", awake, "GiB")
    yield Figure("given back in its sleep", awake - asleep, "GiB", at_least=1.0)
    yield Figure("taken again when it woke", again - asleep, "GiB", at_least=1.0)
    assert first.logprobs is not None and second.logprobs is not None
    pairs = zip(first.logprobs, second.logprobs, strict=True)
    yield Figure("tokens that are the same after it slept", _alike(first.ids, second.ids), at_least=len(first.ids))
    yield Figure("log-probabilities differ by", max(abs(one - other) for one, other in pairs), at_most=SAME)


def transfer(place: Place, *, backend: str) -> Iterator[Figure]:
    """Weights of the first GPU to a vLLM server, on the second by NCCL, on the same one by IPC: what it says is then
    what the model says.
    """
    model = model_of_shape(place, torch.bfloat16).eval()
    served = model_of_shape(place, torch.bfloat16)
    torch.nn.init.normal_(served.model.embed_tokens.weight, std=0.02)  # other weights, until they are sent
    with tempfile.TemporaryDirectory() as folder:
        served.save_pretrained(f"{folder}/served")
        del served
        if backend == "nccl":
            os.environ["CUDA_VISIBLE_DEVICES"] = _second_gpu()  # for the server alone: PyTorch has read it here
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # which IPC's handles need
        extra = (
            "--weight-transfer-config",
            json.dumps({"backend": backend}),
            f"--gpu-memory-utilization={place.vllm_share(12)}",
        )
        with VLLMServerProcess(
            Path(folder) / "served", max_model_len=1024, dtype="bfloat16", extra_args=extra, ready_timeout_s=600
        ) as server:
            asked = ServerOptions(
                urls=(server.url,),
                weights_folder=Path(folder),
                ready_timeout_s=600,
                timeout_s=600,
                group_port=free_port(),
            )
            route = choose_weight_route(asked, device=torch.device("cuda:0"), run_id="proof")
            engine = VLLMServerEngine(asked, vocabulary=model.config.vocab_size, weights=route)
            request = _request(0, 64)
            (before,) = _sampled(engine, [request])
            engine.load_weights(model.named_parameters())
            (after,) = _sampled(engine, [request])
            engine.shutdown()
    yield Figure(
        f"the route is {backend}", float(isinstance(route, TransferWeights) and route.backend == backend), at_least=1
    )
    for what, sample, bounds in (
        ("before, log-probabilities differ at the mean by", before, (None, ROUNDING_BF16)),
        ("after, at the mean by", after, (ROUNDING_BF16, None)),
    ):
        assert sample.logprobs is not None
        own = _own_logprobs(model, [*request.ids, *sample.ids], len(request.ids))
        yield Figure(what, float((own - torch.tensor(sample.logprobs)).abs().mean()), "", *bounds)


def _second_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[1] if visible else "1"


def _engine(place: Place, model: Any, *, max_model_len: int, sleeps: bool = False) -> Engine:
    """Return an engine of the model: vLLM in this process on a GPU, transformers on a CPU."""
    if place.device == "cpu":
        return TransformersEngine(lambda: model, max_model_len=max_model_len)
    from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
    from toolgrpo.engines.vllm_options import VLLMOptions, served_config
    from toolgrpo.engines.vllm_seam import start_vllm

    config = served_config(model)
    options = VLLMOptions(
        dtype=model.dtype,
        max_model_len=max_model_len,
        gpu_memory_utilization=place.vllm_share(24),
        enable_sleep_mode=sleeps,
    )
    engine = VLLMColocateEngine(start_vllm(config, options))
    engine.load_weights(model.named_parameters())
    return engine


def _request(seed: int, max_tokens: int) -> SampleRequest:
    return SampleRequest(tuple(range(11 + seed, 75 + seed)), max_tokens, (), SamplingOptions(), seed)


def _sampled(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sample]:
    async def work() -> list[Sample]:
        await engine.open()
        try:
            return list(await asyncio.gather(*(engine.sample(request) for request in requests)))
        finally:
            await engine.close()

    return asyncio.run(work())


def _own_logprobs(model: Any, ids: Sequence[int], n_prompt: int) -> torch.Tensor:
    """Return what the model's own forward pass says of the tokens after the prompt; the head 256 at a time."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids], device=model.device)).last_hidden_state[0, n_prompt - 1 : -1]
        said = torch.tensor(ids[n_prompt:], device=model.device)
        parts = [
            model.lm_head(part).float().log_softmax(-1).gather(1, token[:, None])[:, 0]
            for part, token in zip(torch.split(hidden, 256), torch.split(said, 256), strict=True)
        ]
    return torch.cat(parts).cpu()


def _used_gib() -> float:
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / GIB


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(left == right for left, right in zip(one, other, strict=True))
