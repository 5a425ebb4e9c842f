"""The server engine against a scripted HTTP server: failures that a real vLLM cannot be made to show on demand.

The real one is in tests/contract and tests/e2e.
"""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from safetensors import safe_open

from toolgrpo.engines import vllm_server
from toolgrpo.engines.base import Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.server_weights import DiskWeights, LoraWeights, NcclWeights, choose_road
from toolgrpo.engines.vllm_server import VLLMServerEngine
from toolgrpo.engines.vllm_worker import WORKER_EXTENSION
from toolgrpo.errors import ConfigError, EngineError

Answer = tuple[int, Any]


class FakeVLLM:
    """Speaks enough of vLLM's HTTP for the engine. `completions` holds what to do with the next requests, then all is well."""

    def __init__(self) -> None:
        self.completions: list[Answer | str] = []
        self.asked: list[dict[str, Any]] = []  # bodies of completion requests
        self.posted: list[tuple[str, Any]] = []  # everything else
        self.weight_version = "default"
        self.adapters: list[str] = []
        self.logprobs_mode = "processed_logprobs"
        self.development = True
        self.version: str | None = None
        self.weight_transfer: dict[str, str] | None = None
        self.worker = "vllm.v1.worker.cpu_worker.CPUWorker"
        self.extension = WORKER_EXTENSION
        self.healthy_after = 0
        self.hang = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(*fake.get(self.path.partition("?")[0]))

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or "null")
                if self.path != "/v1/completions":
                    return self.answer(*fake.post(self.path, body))
                fake.asked.append(body)
                what = fake.completions.pop(0) if fake.completions else fake.complete(body)
                if what == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return None
                if what == "hang":
                    fake.hang.wait(30)
                    what = fake.complete(body)
                return self.answer(*what)

            def answer(self, status: int, body: Any) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def get(self, path: str) -> Answer:
        if path == "/health":
            self.healthy_after -= 1
            return (200 if self.healthy_after < 0 else 503), None
        if path == "/version" and self.version is not None:
            return 200, {"version": self.version}
        if path == "/v1/models":
            cards = [{"id": "base", "parent": None, "max_model_len": 64}]
            return 200, {"data": cards + [{"id": name, "parent": "base"} for name in self.adapters]}
        if path == "/server_info" and self.development:
            config = {
                "model_config": {"logprobs_mode": self.logprobs_mode},
                "weight_transfer_config": self.weight_transfer,
                "parallel_config": {"worker_cls": self.worker, "worker_extension_cls": self.extension},
            }
            return 200, {"vllm_config": config}
        if path == "/weight_info" and self.development:
            return 200, {"weight_version": self.weight_version}
        return 404, None

    def post(self, path: str, body: Any) -> Answer:
        self.posted.append((path, body))
        if path == "/v1/load_lora_adapter":
            self.adapters.append(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        elif path == "/update_weight_version":
            self.weight_version = body["new_version"]
        elif path == "/reset_prefix_cache":
            return 200, {"success": True}
        return 200, None

    def complete(self, body: dict[str, Any]) -> Answer:
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": "no such model"}
        choice = {"token_ids": [5, 9], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "stop"}
        return 200, {"choices": [choice]}

    def stop(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def start() -> Iterator[Callable[[], FakeVLLM]]:
    running: list[FakeVLLM] = []

    def one() -> FakeVLLM:
        running.append(FakeVLLM())
        return running[-1]

    yield one
    for server in running:
        server.stop()


@pytest.fixture
def server(start) -> FakeVLLM:
    return start()


def ask(ids=(1, 2, 3)) -> SampleRequest:
    return SampleRequest(ids=ids, max_tokens=8, stop_ids=(9,), options=SamplingOptions())


def sample_all(engine: VLLMServerEngine, *requests: SampleRequest) -> list[Sample]:
    async def main() -> list[Sample]:
        await engine.open()
        try:
            return [await engine.sample(request) for request in requests]
        finally:
            await engine.close()

    return asyncio.run(main())


# Retries


@pytest.mark.parametrize("failure", [(500, "out of memory"), (503, None), "drop"])
def test_a_lost_connection_or_a_server_error_is_tried_again(server, failure):
    server.completions = [failure, failure]
    (sample,) = sample_all(VLLMServerEngine([server.url]), ask())
    assert sample.ids == (5, 9)
    assert len(server.asked) == 3
    assert server.asked[0] == server.asked[2]


def test_an_aborted_request_is_tried_again(server):
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}
    server.completions = [(200, {"choices": [choice]})]
    assert sample_all(VLLMServerEngine([server.url]), ask())[0].ids == (5, 9)


def test_failures_that_go_on_end_in_an_error_that_names_the_server(server):
    server.completions = [(500, "broken for good")] * 50
    with pytest.raises(EngineError, match=rf"{server.url} failed for 0.5 s.*broken for good"):
        sample_all(VLLMServerEngine([server.url], retry_for_s=0.5), ask())
    assert 1 < len(server.asked) < 5


def test_our_own_mistake_is_not_tried_again(server):
    server.completions = [(400, {"error": "temperature must be in [0, 2]"})]
    with pytest.raises(EngineError, match=r"400.*temperature must be in"):
        sample_all(VLLMServerEngine([server.url]), ask())
    assert len(server.asked) == 1


def test_a_server_that_never_answers_meets_the_deadline_of_the_request(server):
    server.completions = ["hang"]
    with pytest.raises(EngineError, match=r"within 0.3 s"):
        sample_all(VLLMServerEngine([server.url], request_timeout_s=0.3), ask())


def test_another_server_takes_over_from_one_that_fails(start, monkeypatch):
    monkeypatch.setattr(vllm_server, "_DOWN_FOR_S", 600.0)
    broken, sound = start(), start()
    broken.completions = [(500, "broken")] * 50
    engine = VLLMServerEngine([broken.url, sound.url])
    samples = sample_all(engine, *(ask(ids=(n,)) for n in range(6)))
    assert len(samples) == 6
    assert len(sound.asked) == 6
    assert len(broken.asked) == 1  # avoided for a while after its first failure


# Start


def test_the_engine_waits_for_a_server_that_comes_up_and_says_so(server, caplog):
    server.healthy_after = 2
    engine = VLLMServerEngine([server.url + "/v1/"])
    assert engine.max_model_len == 64
    assert "waiting for the vLLM server" in caplog.text
    assert "HTTP 503" in caplog.text


def test_a_server_that_does_not_come_up_is_an_error_with_the_command_to_start_one():
    with pytest.raises(EngineError, match=r"127.0.0.1:9 after .*vllm serve MODEL --logprobs-mode processed_logprobs"):
        VLLMServerEngine(["http://127.0.0.1:9"], ready_timeout_s=0.1)


def test_logprobs_of_another_distribution_are_refused(server):
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        VLLMServerEngine([server.url])


def test_no_url_is_refused():
    with pytest.raises(ConfigError, match="at least one URL"):
        VLLMServerEngine([])


# Weights


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.arange(4.0)), ("b", torch.ones(2, 3).T)]


def test_weights_go_through_a_folder_and_the_old_ones_are_removed(server, tmp_path):
    engine = VLLMServerEngine([server.url], weights=DiskWeights(tmp_path, run_id="run"))
    engine.load_weights(iter(weights()))
    engine.load_weights(iter(weights()))
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    with safe_open(tmp_path / "run-2" / "00000.safetensors", "pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in weights()
        }
    assert [path for path, _ in server.posted] == [
        "/collective_rpc",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
    ] * 2
    reload, repack = server.posted[4][1], server.posted[5][1]
    assert reload == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "run-2")}}
    assert repack == {"method": "toolgrpo_repack_tied_heads"}
    assert server.weight_version == "run-2"


def test_a_gpu_server_needs_no_extension_and_a_cpu_server_without_it_is_refused(server, tmp_path):
    server.extension = ""
    engine = VLLMServerEngine([server.url], weights=DiskWeights(tmp_path))
    with pytest.raises(ConfigError, match=r"--worker-extension-cls toolgrpo\.engines\.vllm_worker\.ToolGRPOWorker"):
        engine.load_weights(iter(weights()))
    server.worker = "vllm.v1.worker.gpu_worker.Worker"
    engine = VLLMServerEngine([server.url], weights=DiskWeights(tmp_path))
    engine.load_weights(iter(weights()))
    assert [body for path, body in server.posted if path == "/collective_rpc"][-1]["method"] == "reload_weights"


def test_a_server_without_development_mode_says_what_to_set(server, tmp_path):
    server.development = False
    server.post = lambda path, body: (404, None)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        VLLMServerEngine([server.url], weights=DiskWeights(tmp_path)).load_weights(iter(weights()))


def test_only_the_main_process_pushes_and_all_meet_afterwards(server, tmp_path):
    met, walked = [], []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            walked.append(name)
            yield name, tensor

    follower = VLLMServerEngine(
        [server.url],
        weights=DiskWeights(tmp_path, run_id="run"),
        is_main_process=False,
        wait_for_everyone=lambda: met.append(True),
    )
    follower.load_weights(gathered())
    assert (walked, met, server.posted) == (["a", "b"], [True], [])
    main = VLLMServerEngine([server.url], weights=DiskWeights(tmp_path, run_id="run"))
    main.load_weights(iter(weights()))
    assert sample_all(follower, ask())[0].ids == (5, 9)  # knows the version that the main process pushed


def test_an_engine_without_a_road_for_weights_says_so(server):
    with pytest.raises(ConfigError, match="no road for weights"):
        VLLMServerEngine([server.url]).load_weights(iter(weights()))


def test_nothing_that_a_restarted_server_drew_from_its_old_weights_is_kept(server, tmp_path):
    engine = VLLMServerEngine([server.url], weights=DiskWeights(tmp_path))
    engine.load_weights(iter(weights()))
    pushed = server.weight_version
    server.weight_version = "default"  # it was restarted; the next connection is a new one
    (sample,) = sample_all(engine, ask())
    assert sample.ids == (5, 9)
    assert len(server.asked) == 2  # the first answer was thrown away
    assert server.weight_version == pushed
    assert len(sample_all(engine, ask(), ask(), ask())) == 3
    assert len(server.asked) == 5


def test_a_lora_adapter_is_loaded_under_a_new_name_and_again_after_a_restart(server, tmp_path):
    saved: list[str] = []

    def save(folder: Any) -> None:
        folder.mkdir(parents=True)
        saved.append(folder.name)

    engine = VLLMServerEngine([server.url], weights=LoraWeights(tmp_path, save, run_id="run"))
    engine.load_weights(iter(()))
    engine.load_weights(iter(()))
    assert saved == ["run-1", "run-2"]
    assert server.adapters == ["run-2"]
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    sample_all(engine, ask())
    assert server.asked[-1]["model"] == "run-2"
    server.adapters = []
    assert sample_all(engine, ask())[0].ids == (5, 9)
    assert server.adapters == ["run-2"]


# Leaving


def test_a_cancelled_request_closes_its_connection(server):
    server.completions = ["hang"]
    engine = VLLMServerEngine([server.url])

    async def main() -> None:
        await engine.open()
        task = asyncio.create_task(engine.sample(ask()))
        while not server.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine._run is not None
        assert not engine._run._in_flight
        assert engine._run._router.open_requests == [0]
        await engine.close()

    asyncio.run(main())
    assert not server.hang.is_set()  # the server never answered


@pytest.mark.parametrize(
    ("device", "started_for", "expected"),
    [
        ("cuda", {"backend": "nccl"}, NcclWeights),
        ("cuda", {"backend": "ipc"}, DiskWeights),
        ("cuda", None, DiskWeights),
        ("cpu", {"backend": "nccl"}, DiskWeights),
    ],
)
def test_nccl_is_taken_from_a_gpu_to_servers_that_were_started_for_it(start, tmp_path, device, started_for, expected):
    first, second = start(), start()
    first.weight_transfer, second.weight_transfer = {"backend": "nccl"}, started_for
    options = {"device": torch.device(device), "folder": tmp_path, "run_id": "run", "ready_timeout_s": 60.0}
    urls = [first.url, second.url]
    assert type(choose_road(urls, **options)) is expected
    assert type(choose_road(urls, **options, save_adapter=lambda folder: None)) is LoraWeights


def test_a_server_of_another_version_is_said_in_one_sentence(server):
    server.version = "0.31.0+cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VLLMServerEngine([server.url]).shutdown()
    server.version = "0.99.0"
    with pytest.warns(UserWarning, match=r"tested with vLLM 0\.31\.0; 0\.99\.0 runs at http://127"):
        VLLMServerEngine([server.url]).shutdown()
