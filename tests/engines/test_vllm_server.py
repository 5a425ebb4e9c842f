"""A real vLLM server on the CPU: killed in mid-rollout and started again, and left by its clients."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from tests.engines.conftest import during_a_rollout
from tests.support.ports import free_port
from tests.support.sampling import gaps, largest_gap, sample_in_turn
from tests.support.server_engine import engine_of
from toolgrpo.engines import server_weights
from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.server_transfer import TransferWeights
from toolgrpo.engines.server_weights import DiskWeights, pause, resume
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.errors import FinalEngineError

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1500)]

TURNS = 5
EPISODES = 12


def ask(ids: list[int], max_tokens: int = 40) -> SampleRequest:
    return SampleRequest(ids=tuple(ids), max_tokens=max_tokens, stop_ids=(), options=SamplingOptions())


def counted(url: str, name: str, label: str = "") -> float:
    lines = httpx.get(f"{url}/metrics", timeout=120).text.splitlines()
    found = [line for line in lines if line.startswith(name + "{") and label in line]
    assert found, f"vLLM has renamed its metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def drawn_in_a_moment(control: ServerControl) -> float:
    """Let a paused server draw for a moment; return how many tokens it has drawn in all."""
    resume(control)
    pause(control)
    return counted(control.url, "vllm:generation_tokens_total")


def test_a_cancelled_request_is_aborted_inside_the_server(vllm_server: Any) -> None:
    """A request that the server went on with would end by its length, as those do that nobody cancels.

    The server is paused but for moments until all 48 requests draw, and stays so while they are cancelled. Where a
    moment was so long that some have ended, those are counted; where all have, it is tried again. Each further
    moment asks the server four times, so that it has heard of the cancelled ones long before they would have drawn
    their 500 tokens.
    """
    engine = engine_of(vllm_server.url)
    control = ServerControl(vllm_server.url)

    def ended_by_length() -> float:
        return counted(vllm_server.url, "vllm:request_success_total", 'finished_reason="length"')

    def running() -> float:
        return counted(vllm_server.url, "vllm:num_requests_running")

    def still_drawing(n: int, drawn: float, ended_before: float) -> float:
        """Let moments pass until all `n` requests draw or have ended, a few tokens each; return how many have not ended."""
        deadline = time.monotonic() + 240
        while drawn_in_a_moment(control) < drawn + 2 * n or ended_by_length() - ended_before + running() != n:
            assert time.monotonic() < deadline, f"{running()} run, and {ended_by_length() - ended_before} ended"
        return running()

    async def cancel_many() -> float:
        drawn = await asyncio.to_thread(drawn_in_a_moment, control)
        ended_before = await asyncio.to_thread(ended_by_length)
        try:
            for _ in range(8):
                tasks = [asyncio.create_task(engine.sample(ask([n, 1], max_tokens=500))) for n in range(48)]
                open_ones = await asyncio.to_thread(still_drawing, len(tasks), drawn, ended_before)
                if open_ones:
                    break
                drawn, ended_before = await asyncio.to_thread(drawn_in_a_moment, control), ended_before + len(tasks)
            assert open_ones, "in each of eight moments the server has drawn all 500 tokens of 48 requests"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in range(4):
                await asyncio.to_thread(drawn_in_a_moment, control)
        finally:
            await asyncio.to_thread(resume, control)
        await engine.sample(ask([7, 1], max_tokens=500))  # as long as any of the cancelled ones would have taken
        await engine.sample(ask([7, 1], max_tokens=1))  # counted after all that ended before it
        return ended_before + len(tasks) - open_ones

    ended_before = during_a_rollout(engine, cancel_many, timeout_s=1400)
    deadline = time.monotonic() + 240
    while (found := ended_by_length()) < ended_before + 2:  # it may count later than it answers
        assert time.monotonic() < deadline, f"{found} have ended by their length, two more than {ended_before} were to"
        time.sleep(0.05)
    assert found == ended_before + 2


def switched_at(old: Any, new: Any, requests: list[SampleRequest], samples: list[Sample]) -> list[int]:
    """Return after how many tokens of the old weights each sample goes on with the new ones, to its end."""
    places = []
    for request, sample in zip(requests, samples, strict=True):
        before, after = gaps(old, request, sample), gaps(new, request, sample)
        assert len(before) == request.max_tokens
        places.append(next((place for place, one in enumerate(before) if one > 1e-4), len(before)))
        assert max(after[places[-1] :], default=0.0) < 1e-4
    return places


def test_new_weights_reach_requests_in_flight_where_they_are(vllm_server: Any, tiny_qwen3: Any, tmp_path: Path) -> None:
    """A sample is of the old weights up to a token, and from there on of the new ones, all that was before it too.

    The server is paused but for moments until every request has begun, so that none ends before the
    new weights come. Where one does (or has not begun), the two weights change places and all begin anew.
    """
    old, new = tiny_qwen3(1), tiny_qwen3(2)
    engine = engine_of(vllm_server.url, weights=DiskWeights(tmp_path), timeout_s=900)
    engine.load_weights(old.named_parameters())
    control = ServerControl(vllm_server.url)
    requests = [ask([n, 1, 2], max_tokens=320) for n in range(4)]

    async def hand_over(weights: Any) -> list[Sample]:
        before = await asyncio.to_thread(drawn_in_a_moment, control)
        tasks = [asyncio.create_task(engine.sample(request)) for request in requests]
        while await asyncio.to_thread(drawn_in_a_moment, control) < before + 2 * len(requests):
            pass
        engine.load_weights(weights.named_parameters())
        return await asyncio.gather(*tasks)

    async def work() -> list[list[int]]:
        found: list[list[int]] = []
        for before, after in [(old, new), (new, old)] * 5:
            found.append(switched_at(before, after, requests, await hand_over(after)))
            if all(0 < place < 320 for place in found[-1]):
                break
        return found

    found = during_a_rollout(engine, work, timeout_s=1400)
    assert all(0 < place < 320 for place in found[-1]), f"the weights came after {found} of 320 tokens"
    engine.shutdown()


def test_a_server_killed_in_a_rollout_comes_back_with_its_weights(
    vllm_server: Any, tiny_qwen3: Any, tmp_path: Path
) -> None:
    """Every turn of every episode is completed, and each token is drawn from the weights that were pushed."""
    trained = tiny_qwen3(1)  # the server itself starts from tiny_qwen3(0)
    engine = engine_of(vllm_server.url, weights=DiskWeights(tmp_path), timeout_s=900)
    engine.load_weights(trained.named_parameters())
    done: list[tuple[SampleRequest, Sample]] = []
    turns_done_at_crash: list[int] = []
    all_are_in_turn_2 = asyncio.Barrier(EPISODES)

    def crash_and_come_back() -> None:
        time.sleep(1)  # requests arrive at the frozen server meanwhile
        vllm_server.kill()
        turns_done_at_crash.append(len(done))
        vllm_server.start()

    crash = threading.Thread(target=crash_and_come_back)

    async def episode(number: int) -> None:
        rng = random.Random(number)
        ids = [rng.randrange(320) for _ in range(20)]
        for turn in range(TURNS):
            request = ask(ids)
            if turn == 2:
                if all_are_in_turn_2.n_waiting == EPISODES - 1:
                    vllm_server.freeze()  # no request of this turn is answered before the crash
                    crash.start()
                await all_are_in_turn_2.wait()
            sample = await engine.sample(request)
            done.append((request, sample))
            ids = [*ids, *sample.ids, rng.randrange(320)]

    async def work() -> None:
        await asyncio.gather(*map(episode, range(EPISODES)))

    try:
        during_a_rollout(engine, work, timeout_s=1400)
    finally:
        if crash.ident is not None:
            crash.join()
    assert len(done) == EPISODES * TURNS
    assert turns_done_at_crash == [2 * EPISODES]
    assert largest_gap(trained, *zip(*done, strict=True)) < 1e-4
    engine.shutdown()


@pytest.mark.slow
def test_weights_arrive_by_four_phases_and_a_restarted_server_is_met_again(
    tiny_qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    from tests.support.vllm_process import VLLMServerProcess

    meet = nccl_engine.open_trainer_endpoint

    def broadcast(*, iterator: Any, group: Any, src: int, **_: Any) -> None:
        for _name, tensor in iterator:
            group.group.broadcast_obj(tensor, src=src)

    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    monkeypatch.setattr(
        nccl_engine,
        "open_trainer_endpoint",
        lambda info: SimpleNamespace(available=True, group=meet(info).group, destroy=lambda: None),
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(server_weights, "_CHUNK_BYTES", 50_000)
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    extra = ["--worker-extension-cls", "tests.support.vllm_store_transfer.StoreTransferWorker"]
    extra += ["--weight-transfer-config", '{"backend": "nccl_over_store"}']
    with VLLMServerProcess(tmp_path / "model", max_model_len=128, ready_timeout_s=900, extra_args=extra) as server:
        assert ServerControl(server.url).weight_transfer == "nccl_over_store"
        route = TransferWeights("nccl", torch.device("cuda"), group_port=free_port(), timeout_s=120.0, run_id="run")
        engine = engine_of(server.url, weights=route, timeout_s=300.0)
        requests = [ask([5, 6, 7]), ask(list(range(60)))]
        for seed in (1, 2):
            engine.load_weights(tiny_qwen3(seed).named_parameters())
            assert largest_gap(tiny_qwen3(seed), requests, sample_in_turn(engine, *requests)) < 1e-4
        assert route.holds(ServerControl(server.url))
        server.kill()
        server.start()
        assert not route.holds(ServerControl(server.url)), "it names the version that it was started with"
        with pytest.raises(FinalEngineError, match="was restarted and has lost the trained weights"):
            sample_in_turn(engine, *requests)
        engine.load_weights(tiny_qwen3(3).named_parameters())
        assert "was restarted; the weight transfer is set up again" in caplog.text
        assert largest_gap(tiny_qwen3(3), requests, sample_in_turn(engine, *requests)) < 1e-4
        engine.shutdown()
