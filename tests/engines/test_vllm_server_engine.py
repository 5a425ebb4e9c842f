"""The server engine against a scripted HTTP server: failures that a real vLLM cannot be made to show on demand.

The real one is in test_engine_contract.py and test_vllm_server.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.support.sampling import sample_in_turn
from tests.support.server_engine import ask, engine_of
from toolgrpo.engines import server_link
from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.server_transfer import TransferWeights, choose_weight_route
from toolgrpo.engines.server_weights import DiskWeights, LoraWeights
from toolgrpo.engines.vllm_options import ServerOptions
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError
from toolgrpo.testing.vllm_stand_in import COMPLETIONS, HANG, Body, StandInVLLM


@pytest.fixture
def start() -> Iterator[Callable[[], StandInVLLM]]:
    with ExitStack() as running:
        yield lambda: running.enter_context(StandInVLLM())


@pytest.fixture
def server(start: Callable[[], StandInVLLM]) -> StandInVLLM:
    return start()


def test_nothing_is_left_to_the_servers_defaults(server: StandInVLLM) -> None:
    options = SamplingOptions(temperature=0.7, top_k=20, min_p=0.1)
    sample_in_turn(engine_of(server), SampleRequest((1, 2, 3), max_tokens=5, stop_ids=(9,), options=options, seed=4))
    assert server.asked == [
        {
            "model": "base",
            "prompt": [1, 2, 3],
            "max_tokens": 5,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 20,
            "min_p": 0.1,
            "repetition_penalty": 1.0,
            "seed": 4,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
    ]


# Retries (after what answers: test_bad_answers.py; of a server that hangs: test_server_patience.py)


def test_failures_that_go_on_end_in_an_error_that_names_the_server(server: StandInVLLM) -> None:
    server.answers[COMPLETIONS] = Body(b"broken for good", 500)
    with pytest.raises(FinalEngineError, match=rf"{server.url}.*2"):
        sample_in_turn(engine_of(server, timeout_s=2.0), ask())
    assert 1 < len(server.asked) < 5


def test_our_own_mistake_is_not_tried_again(server: StandInVLLM) -> None:
    server.answers[COMPLETIONS] = Body(b"temperature must be in [0, 2]", 400)
    with pytest.raises(FinalEngineError, match=r"400.*temperature must be in"):
        sample_in_turn(engine_of(server), ask())
    assert len(server.asked) == 1


def test_another_server_takes_over_from_one_that_fails(
    start: Callable[[], StandInVLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "_DOWN_FOR_S", 600.0)
    broken, sound = start(), start()
    broken.answers[COMPLETIONS] = Body(b"broken", 500)
    engine = engine_of(broken, sound)
    samples = sample_in_turn(engine, *(ask(n) for n in range(6)))
    assert len(samples) == 6
    assert len(sound.asked) == 6
    assert len(broken.asked) == 1  # avoided for a while after its first failure


def test_a_request_goes_to_the_server_with_the_fewest_open_ones(start: Callable[[], StandInVLLM]) -> None:
    servers = [start(), start(), start()]

    async def main() -> None:
        engine = engine_of(*servers)
        await engine.open()
        await asyncio.gather(*(engine.sample(ask(n)) for n in range(6)))
        await engine.close()

    for server in servers:
        server.answers[COMPLETIONS] = HANG
    threading.Thread(target=_release_when_all_are_there, args=(servers, 6), daemon=True).start()
    asyncio.run(main())
    assert [len(server.asked) for server in servers] == [2, 2, 2]


def test_servers_that_were_started_alike_are_given_seeds(start: Callable[[], StandInVLLM]) -> None:
    for servers in ([start()], [start(), start()]):
        sample_in_turn(engine_of(*servers), *(ask(n) for n in range(4)))
        seeds = [request["seed"] for one in servers for request in one.asked]
        assert seeds == [None] * 4 if len(servers) == 1 else len(set(seeds)) == 4


def _release_when_all_are_there(servers: list[StandInVLLM], n_requests: int) -> None:
    while sum(len(server.asked) for server in servers) < n_requests:
        time.sleep(0.01)
    for server in servers:
        server.release()


# Start


def test_the_engine_waits_for_a_server_that_comes_up_and_says_so(
    server: StandInVLLM, caplog: pytest.LogCaptureFixture
) -> None:
    server.unhealthy_answers = 2
    engine = engine_of(server.url + "/v1/")
    assert engine.max_model_len == 64
    assert "waiting for the vLLM server" in caplog.text
    assert "HTTP 503" in caplog.text


def test_a_server_that_does_not_come_up_is_an_error_with_the_command_to_start_one() -> None:
    with pytest.raises(EngineError, match=r"127.0.0.1:9 after .*vllm serve MODEL --logprobs-mode processed_logprobs"):
        engine_of("http://127.0.0.1:9", ready_timeout_s=0.1)


def test_logprobs_of_another_distribution_are_refused(server: StandInVLLM) -> None:
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engine_of(server)


def test_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one URL"):
        engine_of()


# Weights


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.arange(4.0)), ("b", torch.ones(2, 3).T)]


def test_weights_go_through_a_folder_and_the_old_ones_are_removed(server: StandInVLLM, tmp_path: Path) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    engine.load_weights(iter(weights()))
    engine.load_weights(iter(weights()))
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    with safe_open(tmp_path / "run-2" / "00000.safetensors", "pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in weights()
        }
    assert [path for path, _ in server.posted] == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/resume",
    ] * 2
    reload = server.posted[6][1]
    assert reload == {"method": "toolgrpo_reload_weights", "kwargs": {"weights_path": str(tmp_path / "run-2")}}
    assert server.weight_version == "run-2"


def test_a_gpu_server_needs_no_extension_and_a_cpu_server_without_it_is_refused(
    server: StandInVLLM, tmp_path: Path
) -> None:
    server.extension = ""
    engine = engine_of(server, weights=DiskWeights(tmp_path))
    with pytest.raises(ConfigError, match=r"--worker-extension-cls toolgrpo\.engines\.vllm_worker\.ToolGRPOWorker"):
        engine.load_weights(iter(weights()))
    server.worker = "vllm.v1.worker.gpu_worker.Worker"
    engine = engine_of(server, weights=DiskWeights(tmp_path))
    engine.load_weights(iter(weights()))
    assert [body for path, body in server.posted if path == "/collective_rpc"][-1]["method"] == "reload_weights"


def test_a_server_without_development_mode_says_what_to_set(server: StandInVLLM, tmp_path: Path) -> None:
    server.development = False
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        engine_of(server, weights=DiskWeights(tmp_path)).load_weights(iter(weights()))


def test_only_the_main_process_pushes_and_all_meet_afterwards(server: StandInVLLM, tmp_path: Path) -> None:
    met, walked = [], []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            walked.append(name)
            yield name, tensor

    follower = engine_of(
        server,
        weights=DiskWeights(tmp_path, run_id="run"),
        is_main_process=False,
        wait_for_everyone=lambda: met.append(True),
    )
    follower.load_weights(gathered())
    assert (walked, met, server.posted) == (["a", "b"], [True, True], [])
    main = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    main.load_weights(iter(weights()))
    assert sample_in_turn(follower, ask())[0].ids == (5, 9)  # knows the version that the main process pushed


def test_an_engine_without_a_road_for_weights_says_so(server: StandInVLLM) -> None:
    with pytest.raises(ConfigError, match="no route for weights"):
        engine_of(server).load_weights(iter(weights()))


def test_nothing_that_a_restarted_server_drew_from_its_old_weights_is_kept(server: StandInVLLM, tmp_path: Path) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path))
    engine.load_weights(iter(weights()))
    pushed = server.weight_version
    server.weight_version = "default"  # it was restarted; the next connection is a new one
    (sample,) = sample_in_turn(engine, ask())
    assert sample.ids == (5, 9)
    assert len(server.asked) == 2  # the first answer was thrown away
    assert server.weight_version == pushed
    assert len(sample_in_turn(engine, ask(), ask(), ask())) == 3
    assert len(server.asked) == 5


def test_requests_in_flight_wait_out_new_weights_and_those_of_a_restarted_server_are_drawn_again(
    server: StandInVLLM, tmp_path: Path
) -> None:
    """Between two requests of a rollout: the hand-over itself may find the restart, before any answer does."""
    engine = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    assert engine.takes_weights_while_open
    engine.load_weights(iter(weights()))
    server.next_answers[COMPLETIONS] = [HANG, HANG]

    async def main(restarts: bool) -> tuple[Sample, Sample]:
        await engine.open()
        tasks = [asyncio.create_task(engine.sample(ask(n))) for n in range(2)]
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        if restarts:
            server.restart()
        engine.load_weights(iter(weights()))
        server.release()
        first, second = await asyncio.gather(*tasks)
        await engine.close()
        return first, second

    asyncio.run(main(restarts=False))
    assert (len(server.asked), server.weight_version, server.is_paused) == (2, "run-2", False)
    server.next_answers[COMPLETIONS] = [HANG, HANG]
    server.hold()
    server.asked.clear()
    asyncio.run(main(restarts=True))
    assert (len(server.asked), server.weight_version) == (4, "run-3"), "drawn from the weights it was restarted with"


def test_nobody_restores_older_weights_while_newer_ones_are_pushed(server: StandInVLLM, tmp_path: Path) -> None:
    """A restored answer is on its way while the trainer hands over: the push waits for it, and comes after it."""
    engine = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    engine.load_weights(iter(weights()))
    server.restart()
    server.posted.clear()
    server.next_answers["/weight_info"] = [HANG]

    async def main() -> Sample:
        await engine.open()
        task = asyncio.create_task(engine.sample(ask()))
        while server.next_answers["/weight_info"]:
            await asyncio.sleep(0.01)  # the question hangs, its asker has the lock
        threading.Timer(0.2, server.release).start()
        engine.load_weights(iter(weights()))
        sample = await task
        await engine.close()
        return sample

    assert asyncio.run(main()).ids == (5, 9)
    named = [body["new_version"] for path, body in server.posted if path == "/update_weight_version"]
    assert named == ["run-1", "run-2"] and len(server.asked) == 2


def test_a_lora_adapter_is_loaded_under_a_new_name_and_again_after_a_restart(
    server: StandInVLLM, tmp_path: Path
) -> None:
    saved: list[str] = []

    def save(folder: Any) -> None:
        folder.mkdir(parents=True)
        saved.append(folder.name)

    engine = engine_of(server, weights=LoraWeights(tmp_path, save, run_id="run"))
    engine.load_weights(iter(()))
    engine.load_weights(iter(()))
    assert saved == ["run-1", "run-2"]
    assert not engine.takes_weights_while_open  # a server holds one adapter at a time
    assert server.adapters == ["run-2"]
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    sample_in_turn(engine, ask())
    assert server.asked[-1]["model"] == "run-2"
    server.adapters = []
    assert sample_in_turn(engine, ask())[0].ids == (5, 9)
    assert server.adapters == ["run-2"]


# Leaving


def test_a_cancelled_request_closes_its_connection(server: StandInVLLM) -> None:
    server.next_answers[COMPLETIONS] = [HANG]
    engine = engine_of(server)

    async def main() -> None:
        await engine.open()
        task = asyncio.create_task(engine.sample(ask()))
        while not server.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine._run is not None
        assert not engine._run.in_flight
        assert engine._run.links[0].n_open == 0
        await engine.close()

    asyncio.run(main())
    assert not server.is_released  # the server never answered


@pytest.mark.parametrize(
    ("device", "started_for", "expected", "says"),
    [
        ("cuda", ("nccl", "nccl"), TransferWeights, ""),
        ("cuda", ("ipc", "ipc"), TransferWeights, ""),
        (
            "cuda",
            ("nccl", "ipc"),
            DiskWeights,
            "were started for ipc, nccl as their weight transfer, not all for one of",
        ),
        ("cuda", ("nccl", None), DiskWeights, "were started for nccl, none as their weight transfer"),
        ("cuda", ("nccl_m2n", "nccl_m2n"), DiskWeights, "were started for nccl_m2n as their weight transfer"),
        ("cuda", (None, None), DiskWeights, ""),
        ("cpu", ("nccl", "nccl"), DiskWeights, ""),
    ],
)
def test_vllms_transfer_is_taken_from_a_gpu_to_servers_that_were_started_for_it(
    start: Callable[[], StandInVLLM],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    device: str,
    started_for: tuple[str | None, str | None],
    expected: type[Any],
    says: str,
) -> None:
    first, second = start(), start()
    for server, backend in zip((first, second), started_for, strict=True):
        server.weight_transfer = None if backend is None else {"backend": backend}
    asked = ServerOptions(urls=(first.url, second.url), weights_folder=tmp_path, timeout_s=60.0)
    options: dict[str, Any] = {"device": torch.device(device), "run_id": "run"}
    assert type(choose_weight_route(asked, **options)) is expected
    assert (says in caplog.text) and bool(says) == ("weights go through a folder" in caplog.text)
    assert type(choose_weight_route(asked, **options, save_adapter=lambda folder: None)) is LoraWeights


def test_a_server_of_another_version_is_said_in_one_sentence(server: StandInVLLM) -> None:
    server.version = "0.32.0+cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of(server).shutdown()
    server.version = "0.99.0"
    with pytest.warns(UserWarning, match=r"vLLM 0\.31\.0, 0\.32\.0; 0\.99\.0.*http://127"):
        engine_of(server).shutdown()
