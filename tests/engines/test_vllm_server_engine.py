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
from safetensors.torch import load_file

from tests.engines.conftest import during_a_rollout
from tests.support.sampling import sample_in_turn, sample_together
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


def test_nothing_is_left_to_the_servers_defaults(server: StandInVLLM) -> None:
    options = SamplingOptions(temperature=0.7, top_k=20, min_p=0.1)
    sample_in_turn(engine_of(server), SampleRequest((1, 2, 3), max_tokens=5, stop_ids=(9,), options=options, seed=4))
    drawn = {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.0, "seed": 4}
    ended = {"max_tokens": 5, "stop_token_ids": [9], "ignore_eos": True, "add_special_tokens": False}
    told = {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    assert server.asked == [{"model": "base", "prompt": [1, 2, 3], **drawn, **ended, **told}]


# Retries (after what answers: test_bad_answers.py; for how long: test_server_patience.py)


def test_our_own_mistake_is_not_tried_again(server: StandInVLLM) -> None:
    server.answers[COMPLETIONS] = Body(b"temperature must be in [0, 2]", 400)
    with pytest.raises(FinalEngineError, match=r"400.*temperature must be in"):
        sample_in_turn(engine_of(server), ask())
    assert len(server.asked) == 1


@pytest.mark.parametrize("bad", [Body(b"broken", 500), Body(b"{}"), HANG], ids=["fails", "not believed", "hangs"])
def test_another_server_takes_over(start: Callable[[], StandInVLLM], monkeypatch: pytest.MonkeyPatch, bad: Any) -> None:
    monkeypatch.setattr(server_link, "_DOWN_FOR_S", 600.0)
    broken, sound = start(), start()
    broken.answers[COMPLETIONS] = bad
    samples = sample_in_turn(engine_of(broken, sound, timeout_s=2.0), *(ask(n) for n in range(6)))
    assert [sample.ids for sample in samples] == [(5, 9)] * 6 and len(sound.asked) == 6
    assert len(broken.asked) == 1  # avoided for a while after its first failure


def test_a_request_goes_to_the_server_with_the_fewest_open_ones(start: Callable[[], StandInVLLM]) -> None:
    servers = [start(), start(), start()]
    for server in servers:
        server.answers[COMPLETIONS] = HANG

    def release_when_all_are_there() -> None:
        while sum(len(server.asked) for server in servers) < 6:
            time.sleep(0.01)
        for server in servers:
            server.release()

    threading.Thread(target=release_when_all_are_there, daemon=True).start()
    sample_together(engine_of(*servers), *(ask(n) for n in range(6)))
    assert [len(server.asked) for server in servers] == [2, 2, 2]


def test_servers_that_were_started_alike_are_given_seeds(start: Callable[[], StandInVLLM]) -> None:
    for servers in ([start()], [start(), start()]):
        sample_in_turn(engine_of(*servers), *(ask(n) for n in range(4)))
        seeds = [request["seed"] for one in servers for request in one.asked]
        assert seeds == [None] * 4 if len(servers) == 1 else len(set(seeds)) == 4


# Start


def test_the_engine_waits_for_a_server_and_says_what_is_wrong(server: StandInVLLM, caplog: Any) -> None:
    server.unhealthy_answers = 2
    assert engine_of(server.url + "/v1/").max_model_len == 64
    assert "waiting for the vLLM server" in caplog.text and "HTTP 503" in caplog.text
    with pytest.raises(EngineError, match=r"127.0.0.1:9 after .*vllm serve MODEL --logprobs-mode processed_logprobs"):
        engine_of("http://127.0.0.1:9", ready_timeout_s=0.1)
    server.logprobs_mode = "raw_logprobs"  # of another distribution than is drawn from
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        engine_of(server)


# Weights


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.arange(4.0)), ("b", torch.ones(2, 3).T)]


def test_weights_go_through_a_folder_and_the_old_ones_are_removed(server: StandInVLLM, tmp_path: Path) -> None:
    engine = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    engine.load_weights(iter(weights()))
    engine.load_weights(iter(weights()))
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    written = load_file(tmp_path / "run-2" / "00000.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {n: one.tolist() for n, one in weights()}
    held = ["/collective_rpc", "/reset_prefix_cache?reset_running_requests=true", "/update_weight_version"]
    assert [path for path, _ in server.posted] == ["/pause?mode=keep", *held, "/resume"] * 2
    reload = server.posted[6][1]
    assert reload == {"method": "toolgrpo_reload_weights", "kwargs": {"weights_path": str(tmp_path / "run-2")}}
    assert server.weight_version == "run-2"
    engine_of(server, weights=DiskWeights(tmp_path, run_id="resumed")).load_weights(iter(weights()))
    assert [path.name for path in tmp_path.iterdir()] == ["resumed-1"]


def test_a_window_is_at_most_that_of_the_servers(server: StandInVLLM) -> None:
    assert engine_of(server, max_model_len=16).max_model_len == 16
    with pytest.raises(ConfigError, match="--max-model-len 4096"):
        engine_of(server, max_model_len=4096)


def test_a_cpu_server_without_the_extension_is_refused_and_a_gpu_needs_none(
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


def test_without_development_mode_or_a_road_for_weights_it_says_so(server: StandInVLLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no route for weights"):
        engine_of(server).load_weights(iter(weights()))
    server.development = False
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        engine_of(server, weights=DiskWeights(tmp_path)).load_weights(iter(weights()))


def test_only_the_main_process_pushes_and_all_meet_afterwards(server: StandInVLLM, tmp_path: Path) -> None:
    met: list[bool] = []
    gathered = iter(weights())
    one_of_many: dict[str, Any] = {"is_main_process": False, "wait_for_everyone": lambda: met.append(True)}
    follower = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"), **one_of_many)
    follower.load_weights(gathered)
    assert ([*gathered], met, server.posted) == ([], [True, True], []), "it walks the weights, and that is all"
    main = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    main.load_weights(iter(weights()))
    assert sample_in_turn(follower, ask())[0].ids == (5, 9)  # knows the version that the main process pushed


def test_requests_in_flight_wait_out_new_weights_or_are_drawn_again(server: StandInVLLM, tmp_path: Path) -> None:
    """Between two requests of a rollout: the hand-over itself may find the restart, before any answer does."""
    engine = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    assert engine.takes_weights_while_open
    engine.load_weights(iter(weights()))
    server.next_answers[COMPLETIONS] = [HANG, HANG]

    async def work(restarts: bool) -> None:
        tasks = [asyncio.create_task(engine.sample(ask(n))) for n in range(2)]
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        if restarts:
            server.restart()
        engine.load_weights(iter(weights()))  # which blocks where an event loop runs already, as in a notebook
        server.release()
        await asyncio.gather(*tasks)

    during_a_rollout(engine, lambda: work(restarts=False))
    assert (len(server.asked), server.weight_version, server.is_paused) == (2, "run-2", False)
    server.next_answers[COMPLETIONS] = [HANG, HANG]
    server.hold()
    server.asked.clear()
    during_a_rollout(engine, lambda: work(restarts=True))
    assert (len(server.asked), server.weight_version) == (4, "run-3"), "drawn from the weights it was restarted with"


def test_nobody_restores_older_weights_while_newer_ones_are_pushed(server: StandInVLLM, tmp_path: Path) -> None:
    """A restored answer is on its way while the trainer hands over: the push waits for it, and comes after it."""
    engine = engine_of(server, weights=DiskWeights(tmp_path, run_id="run"))
    engine.load_weights(iter(weights()))
    server.restart()
    server.posted.clear()
    server.next_answers["/weight_info"] = [HANG]

    async def work() -> Sample:
        task = asyncio.create_task(engine.sample(ask()))
        while server.next_answers["/weight_info"]:
            await asyncio.sleep(0.01)  # the question hangs, its asker has the lock
        threading.Timer(0.2, server.release).start()
        engine.load_weights(iter(weights()))
        return await task

    assert during_a_rollout(engine, work).ids == (5, 9)
    named = [body["new_version"] for path, body in server.posted if path == "/update_weight_version"]
    assert named == ["run-1", "run-2"] and len(server.asked) == 2


def test_an_adapter_is_loaded_under_a_new_name_and_again_after_a_restart(server: StandInVLLM, tmp_path: Path) -> None:
    saved: list[str] = []

    def save(folder: Any) -> None:
        folder.mkdir(parents=True)
        saved.append(folder.name)

    engine = engine_of(server, weights=LoraWeights(tmp_path, save, run_id="run"))
    engine.load_weights(iter(()))
    engine.load_weights(iter(()))
    assert not engine.takes_weights_while_open  # a server holds one adapter at a time
    assert (saved, server.adapters) == (["run-1", "run-2"], ["run-2"])
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

    async def work() -> None:
        task = asyncio.create_task(engine.sample(ask()))
        while not server.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine._run is not None
        assert not engine._run.in_flight
        assert engine._run.links[0].n_open == 0

    during_a_rollout(engine, work)
    assert not server.is_released  # the server never answered


ROUTES: list[tuple[str, tuple[str | None, str | None], type[Any], str]] = [
    ("cuda", ("nccl", "nccl"), TransferWeights, ""),
    ("cuda", ("ipc", "ipc"), TransferWeights, ""),
    ("cuda", ("nccl", "ipc"), DiskWeights, "started for ipc, nccl"),
    ("cuda", ("nccl", None), DiskWeights, "started for nccl, none"),
    ("cuda", ("nccl_m2n", "nccl_m2n"), DiskWeights, "started for nccl_m2n"),
    ("cuda", (None, None), DiskWeights, ""),
    ("cpu", ("nccl", "nccl"), DiskWeights, ""),
]


def test_vllms_transfer_is_taken_from_a_gpu_to_servers_that_were_started_for_it(
    start: Callable[[], StandInVLLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(), start()
    asked = ServerOptions(urls=(first.url, second.url), weights_folder=tmp_path, timeout_s=60.0)
    for device, started_for, expected, says in ROUTES:
        caplog.clear()
        for server, backend in zip((first, second), started_for, strict=True):
            server.weight_transfer = None if backend is None else {"backend": backend}
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
