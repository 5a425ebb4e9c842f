"""Weights by vLLM's own transfer: its trainer's classes on the CPU against servers that note what they are told.

What is replaced is what needs a GPU: the communicator, and how bytes are packed. With a real server, whose weights come
through a store: test_vllm_server.py.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.ports import free_port
from tests.support.sampling import sample_in_turn
from tests.support.server_engine import ask, engine_of
from toolgrpo.engines import server_transfer, server_weights, vllm_http
from toolgrpo.engines.server_transfer import TransferWeights, first_free_port
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError
from toolgrpo.testing.vllm_stand_in import Body, StandInVLLM

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.vllm

PHASES = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/update_weights"]
PHASES += ["/reset_prefix_cache?reset_running_requests=true", "/finish_weight_update", "/resume"]


@dataclass
class Group:
    """A communicator that was met; what goes over it is noted."""

    met: Any
    available: bool

    def destroy(self) -> None:
        """vLLM 0.32 asks for it where a group ends."""


@dataclass
class Wire:
    """What the trainer's side of vLLM did, in place of NCCL."""

    groups: list[Group] = field(default_factory=list)
    sent: list[dict[str, torch.Tensor]] = field(default_factory=list)
    library_found: bool = True
    blocked: threading.Event | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody takes what is broadcast."""
        self.blocked = threading.Event()
        try:
            yield
        finally:
            self.blocked.set()

    def meet(self, init_info: Any) -> Group:
        self.groups.append(Group(init_info, self.library_found))
        return self.groups[-1]

    def broadcast(self, *, iterator: Any, group: Group, src: int, **_: Any) -> None:
        assert group is self.groups[-1] and src == 0
        if self.blocked is not None:
            assert self.blocked.wait(60)
        self.sent.append(dict(iterator))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    from vllm.distributed.weight_transfer import nccl_engine

    wire = Wire()
    for name, replacement in (("open_trainer_endpoint", wire.meet), ("packed_nccl_broadcast_producer", wire.broadcast)):
        assert hasattr(nccl_engine, name), f"vLLM's trainer for NCCL has no {name} any more; see server_transfer.py"
        monkeypatch.setattr(nccl_engine, name, replacement)
    monkeypatch.setattr(server_weights, "_CHUNK_BYTES", 16)
    return wire


@pytest.fixture
def servers() -> Iterator[list[StandInVLLM]]:
    with ExitStack() as running:
        both = [running.enter_context(StandInVLLM()) for _ in range(2)]
        for server, n_workers in zip(both, (2, 4), strict=True):
            server.weight_transfer, server.n_workers = {"backend": "nccl"}, n_workers
        yield both


def route_of(backend: str = "nccl", **options: Any) -> TransferWeights:
    chosen: dict[str, Any] = {"group_port": free_port(), "timeout_s": 20.0, "run_id": "run", **options}
    return TransferWeights(backend, torch.device("cuda"), **chosen)


def weights(factor: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("a", factor * torch.arange(4.0)), ("b", factor * torch.ones(2, 3, dtype=torch.bfloat16).T)]


def controls(servers: list[StandInVLLM]) -> list[ServerControl]:
    return [ServerControl(server.url, timeout_s=20.0) for server in servers]


def test_an_update_has_four_phases_with_its_chunks_and_its_version(servers: list[StandInVLLM], wire: Wire) -> None:
    port = free_port()
    route = route_of(group_port=port)
    route.push(iter(weights()), controls(servers))
    meeting = wire.groups[0].met
    assert (meeting.master_address, meeting.master_port, meeting.world_size, meeting.rank) == ("127.0.0.1", port, 7, 0)
    for server, first_rank in zip(servers, (1, 3), strict=True):
        assert [path for path, _ in server.posted] == ["/init_weight_transfer_engine", *PHASES]
        met = {"master_address": "127.0.0.1", "master_port": port, "world_size": 7, "packed": True}
        assert server.posted[0][1]["init_info"].items() >= {**met, "rank_offset": first_rank}.items()
        assert server.taken == [
            {"names": ["a"], "dtype_names": ["float32"], "shapes": [[4]]},
            {"names": ["b"], "dtype_names": ["bfloat16"], "shapes": [[3, 2]]},
        ]
        assert (server.weight_version, server.is_paused) == ("run-1", False)
    assert [list(chunk) for chunk in wire.sent] == [["a"], ["b"]]
    assert all(torch.equal(wire.sent[n][name], tensor) for n, (name, tensor) in enumerate(weights()))
    route.push(iter(weights(2.0)), controls(servers))
    assert [path for path, _ in servers[0].posted[8:]] == PHASES, "they have met already"
    assert len(wire.groups) == 1 and servers[1].weight_version == "run-2"
    route.close()
    route.close()


def test_a_restarted_server_is_met_anew(
    servers: list[StandInVLLM], wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    route = route_of()
    route.push(iter(weights()), controls(servers))
    servers[1].restart()
    route.push(iter(weights()), controls(servers))
    assert f"the vLLM server at {servers[1].url} was restarted; the weight transfer is set up again" in caplog.text
    assert len(wire.groups) == 2 and [server.weight_version for server in servers] == ["run-2", "run-2"]
    for server in servers:  # the one that was not restarted has to join the new group, too
        assert [path for path, _ in server.posted].count("/init_weight_transfer_engine") == 2

    engine = engine_of(servers[0], weights=route_of(), timeout_s=300.0)
    engine.load_weights(iter(weights()))
    servers[0].restart()  # in a rollout, which ends at once
    with pytest.raises(FinalEngineError, match=r"was restarted and has lost the trained weights.*last checkpoint"):
        sample_in_turn(engine, ask())
    engine.shutdown()


def test_a_server_that_refuses_ends_the_update_that_waits_for_it(servers: list[StandInVLLM], wire: Wire) -> None:
    servers[1].answers["/update_weights"] = Body(b"CUDA error", 500)
    refused = pytest.raises(EngineError, match=rf"{servers[1].url}.*/update_weights: HTTP 500.*CUDA")
    with wire.held(), refused:
        route_of(timeout_s=300.0).push(iter(weights()), controls(servers))
    assert [path for path, _ in servers[1].posted].count("/update_weights") == 1 and servers[1].is_paused
    assert servers[1].weight_version == "default"


def test_a_broadcast_that_nobody_takes_ends_in_time(servers: list[StandInVLLM], wire: Wire) -> None:
    route = route_of()
    route.push(iter(weights()), controls(servers))
    route._timeout_s = 0.2
    with wire.held(), pytest.raises(FinalEngineError, match=r"nccl weight transfer.* within 0.2 s"):
        route.push(iter(weights()), controls(servers))


def test_what_vllm_raises_is_said(servers: list[StandInVLLM], wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    wire.library_found = False
    with pytest.raises(ConfigError, match="NCCL"):
        route_of().push(iter(weights()), controls(servers))
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", Mock(side_effect=RuntimeError("the store is gone")))
    with pytest.raises(
        FinalEngineError, match=r"could not meet its servers: RuntimeError: the store is gone\. Restart"
    ):
        route_of().push(iter(weights()), controls(servers))


def test_followers_walk_the_weights_and_say_nothing(servers: list[StandInVLLM], wire: Wire) -> None:
    follower, gathered = route_of(process_index=1), iter(weights())
    follower.follow(gathered)
    assert not [*gathered] and not servers[0].posted and not wire.groups
    servers[0].weight_version = "run-1"
    assert follower.holds(controls(servers)[0]), "it counts the versions as the main process does"


def test_on_one_gpu_the_main_process_tells_handles(servers: list[StandInVLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    sizes: list[int] = []
    segments = ["expandable_segments:True,max_split_size_mb:512"]  # of which each time the last is in force

    def packed(*, iterator: Any, gpu_uuid: str, buffer_size_bytes: int, **_: Any) -> Iterator[PackedIpcChunk]:
        sizes.append(buffer_size_bytes)
        assert segments[-1] == segments[0].replace("True", "False"), "or other processes could not open the memory"
        ((name, tensor),) = iterator
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield PackedIpcChunk([name], [list(tensor.shape)], [dtype], [tensor.nbytes], {gpu_uuid: ("handle", name)})

    monkeypatch.setattr(server_weights, "_CHUNK_BYTES", 12)
    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", packed)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", segments[0])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", segments.append)
    for server in servers:
        server.weight_transfer = {"backend": "ipc"}
    route_of("ipc").push(iter(weights()), controls(servers))
    follower = route_of("ipc", process_index=1)
    follower.follow(iter(weights()))
    assert segments[-1] == segments[0]
    assert sizes == [16, 12, 16, 12], "each process shares what lies on its GPU, in buffers that hold a chunk"
    for server in servers:
        assert [path for path, _ in server.posted] == ["/init_weight_transfer_engine", *PHASES]
        assert server.posted[0][1] == {"init_info": {"packed": True}}
        handles = [pickle.loads(base64.b64decode(one.pop("ipc_handles_pickled"))) for one in server.taken]
        assert handles == [{"GPU-1": ("handle", "a")}, {"GPU-1": ("handle", "b")}]
        told = {"names": ["b"], "dtype_names": ["bfloat16"], "shapes": [[3, 2]], "tensor_sizes": [12]}
        assert server.taken[1] == told
        assert server.weight_version == "run-1"


@pytest.mark.parametrize(
    ("path", "bad", "words"),
    [
        ("/get_world_size", lambda honest: {"world_size": 0}, "world_size is 0"),
        ("/start_weight_update", Body(b"a weight update is already active", 500), "already active"),
        ("/start_weight_update", Body(b"<html>", 200), "<html>"),
        ("/finish_weight_update", lambda honest: {}, "message is missing"),
        ("/init_weight_transfer_engine", Body(b"none", 404), "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_phase_that_is_not_answered_as_it_should_ends_in_a_sentence_and_is_never_said_twice(
    servers: list[StandInVLLM], wire: Wire, monkeypatch: pytest.MonkeyPatch, path: str, bad: Any, words: str
) -> None:
    monkeypatch.setattr(vllm_http, "_FIRST_PAUSE_S", 0.001)
    servers[0].answers[path] = bad
    with pytest.raises((EngineError, ConfigError)) as failure:
        route_of().push(iter(weights()), controls(servers))
    assert servers[0].url in str(failure.value) and words in str(failure.value)
    assert path == "/get_world_size" or servers[0].paths_asked.count(path) == 1


def test_a_port_that_is_taken_is_passed_over_and_the_address_is_the_one_that_the_servers_see() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert first_free_port(port) > port
    assert first_free_port(port) == port
    assert server_transfer._own_address(["http://127.0.0.1:1", "http://127.0.0.1:2"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"IPv4.*http://\[::1\]:8000"):
        server_transfer._own_address(["http://[::1]:8000"])
