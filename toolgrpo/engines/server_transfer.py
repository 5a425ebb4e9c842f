"""Weights to a `vllm serve` without a disk in between: vLLM's own transfer, in its four phases.

    meet      /init_weight_transfer_engine   once, at a port that is free; anew after a restart
    start     /start_weight_update
    take      /update_weights                for each chunk of about a GiB
    finish    /finish_weight_update          with the version of the weights

The servers are paused around the last three. `nccl` goes from the GPU of process 0 to those of the
servers, all in one group; with `ipc` they are the same GPUs, each process giving what lies on its own.

Invariants: no call is made twice; before an update every server is asked for its version, and one
that has another was restarted, so that all meet again; one that is restarted in the middle of a
rollout ends it, since nobody walks the weights then. A call ends within its seconds, or as soon as a
server has refused its part (NCCL itself waits for a peer for ever); the thread that may be left
behind is a daemon.

The one file that touches vLLM's transfer on the trainer's side. Tested with vLLM 0.32.0; what is used
(`tests/engines/test_vllm_transfer.py` fails with a sentence when one of these changes):

* `NCCLTrainerWeightTransferEngine` and `IPCTrainerWeightTransferEngine`: `trainer_init` meets the
  servers, `send_weights` sends what `source` walks. One is kept for many sends, each of one chunk of
  a walk: `source`, and with IPC `packed_buffer_size_bytes`, are set before each;
* the client they call (`VLLMWeightSyncClient`), four methods. They call `start_weight_update` and
  `finish_weight_update` around each send, and here an update is made of many: both are said to the
  servers around all of them instead, with the version at the end;
* `WeightSource` and `ParamMeta`, the form of a chunk;
* `PyNcclCommunicator.available`: without NCCL's library a broadcast does nothing, and says nothing.

**NCCL and IPC have not been run by this project's tests: they need GPUs.** What is around them is:
the meeting, the order and the content of what is said, with vLLM's own classes and a real server on
the CPU, whose weights come through a store instead.
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from toolgrpo.engines import server_answers
from toolgrpo.engines.server_weights import (
    DiskWeights,
    LoraWeights,
    ServerWeights,
    Weights,
    chunks,
    for_each,
    forget_prefixes,
    pause,
    resume,
)
from toolgrpo.engines.vllm_http import ServerControl, in_thread
from toolgrpo.engines.vllm_options import ServerOptions, vllm_available
from toolgrpo.engines.vllm_seam import fixed_segments
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError

BACKENDS = ("nccl", "ipc")
_PORTS_TRIED = 100
_log = getLogger(__name__)


class TransferWeights(ServerWeights):
    """Weights through the engines that the servers were started for, `nccl` or `ipc`.

    `group_port` is the first port that is tried for the meeting (TRL's `vllm_group_port`).
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        *,
        group_port: int,
        timeout_s: float,
        run_id: str,
        process_index: int = 0,
    ) -> None:
        super().__init__(run_id)
        self.backend = backend
        self._device = device
        self._group_port = group_port
        self._timeout_s = timeout_s
        self._process_index = process_index
        self._servers = _Servers([])
        self._engine: Any = None  # vLLM's, once it has met the servers; process 0 speaks for all

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        self._meet(servers)
        self._version += 1
        for_each(servers, _start)
        for chunk in chunks(weights):
            self._send(chunk)
        for_each(servers, self._finish)

    def follow(self, weights: Weights) -> None:
        if self.backend == "nccl":
            return super().follow(weights)
        self._version += 1
        if self._engine is None:
            self._engine = self._watched("meet its servers", self._new_engine)
        for chunk in chunks(weights):
            self._send(chunk)

    def restore(self, server: ServerControl) -> None:
        raise FinalEngineError(
            f"the vLLM server at {server.url} was restarted and has lost the trained weights, and with them its place "
            f"in the {self.backend} transfer. Resume the training from the last checkpoint; without "
            f"--weight-transfer-config on the servers a restart costs nothing."
        )

    def close(self) -> None:
        """Leave the group, if there is one."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None

    def _meet(self, servers: Sequence[ServerControl]) -> None:
        """Meet the servers, if they have not been met, or not all of them still know it."""
        if self._engine is not None:
            lost = [server.url for server in servers if not self.holds(server)]
            if not lost:
                return
            _log.warning("the vLLM server at %s was restarted; the weight transfer is set up again", ", ".join(lost))
            self.close()
        self._servers = _Servers(servers)
        self._engine = self._watched("meet its servers", self._new_engine)

    def _finish(self, server: ServerControl) -> None:
        """Forget every cached prefix, and only then name the version; then let it go on."""
        forget_prefixes(server)
        _phase(server, "/finish_weight_update", {"weight_version": self._name})
        resume(server)

    def _send(self, chunk: Mapping[str, torch.Tensor]) -> None:
        """Send these tensors, which stay as they are until it returns."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize(self._device)  # vLLM reads them on streams of its own
        self._engine.source = _source(chunk)
        if self.backend == "ipc":  # where a tensor larger than the buffer is refused; NCCL's size was agreed on
            self._engine.packed_buffer_size_bytes = sum(tensor.nbytes for tensor in chunk.values())
        with fixed_segments() if self.backend == "ipc" else nullcontext():
            self._watched("send weights", self._engine.send_weights)

    def _new_engine(self) -> Any:
        """Return vLLM's engine when it has met the servers."""
        source = _source({})
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            asked = IPCTrainerInitInfo(rank=self._process_index, packed=True)
            return IPCTrainerWeightTransferEngine.trainer_init(asked, client=self._servers, source=source)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        asked_nccl = NCCLTrainerInitInfo(
            rank=self._process_index,
            master_address=_own_address([*self._servers.first_rank]),
            master_port=first_free_port(self._group_port),
            world_size=1 + self._servers.n_workers,  # the trainer counts
        )
        engine = NCCLTrainerWeightTransferEngine.trainer_init(asked_nccl, client=self._servers, source=source)
        if not engine.model_update_group.available:
            raise ConfigError(
                "vLLM finds no library of NCCL in the trainer's environment; install one, or start the servers "
                "without --weight-transfer-config, so that weights go through a folder"
            )
        return engine

    def _watched(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what `work` does in a thread, which nobody waits for once a server has refused."""
        number = self._device.index  # a thread begins on the first device
        there: AbstractContextManager[Any] = nullcontext() if number is None else torch.accelerator.device_index(number)

        def there_done() -> Any:
            with there:
                return work()

        outcome = in_thread(there_done)
        wait([outcome, self._servers.refusal], self._timeout_s, FIRST_COMPLETED)
        if self._servers.refusal.done():
            raise self._servers.refusal.result()
        if not outcome.done():
            raise FinalEngineError(
                f"vLLM's {self.backend} weight transfer did not {what} within {self._timeout_s:g} s (--engine_timeout). "
                f"Look at the servers' logs, restart them, and resume from the last checkpoint."
            )
        error = outcome.exception()
        if error is None or isinstance(error, EngineError | ConfigError):
            return outcome.result()
        raise FinalEngineError(
            f"vLLM's {self.backend} weight transfer could not {what}: {type(error).__name__}: {error}. Restart "
            f"the servers, and resume from the last checkpoint; without --weight-transfer-config weights go through "
            f"a folder."
        ) from error


class _Servers:
    """The servers of one transfer, each with its own place in the group; vLLM's `VLLMWeightSyncClient`."""

    def __init__(self, servers: Sequence[ServerControl]) -> None:
        self.refusal: Future[Exception] = Future()  # the first, of any call
        self._servers = servers
        self.first_rank: dict[str, int] = {}  # by the URL of each
        self.n_workers = 0
        for server in servers:
            self.first_rank[server.url] = 1 + self.n_workers  # the trainer is 0
            self.n_workers += server.get("/get_world_size", server_answers.world_size)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Say where to meet, to all at a time: each waits for the others."""
        self._to_all(partial(self._meet, init_info))

    def _meet(self, init_info: dict[str, Any], server: ServerControl) -> None:
        place = {"rank_offset": self.first_rank[server.url]} if "rank_offset" in init_info else {}
        _phase(server, "/init_weight_transfer_engine", {"init_info": {**init_info, **place}})

    def start_weight_update(self) -> None:
        """Say nothing: one update is made of many sends, and was started before the first."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Say what comes now, to all at a time; over HTTP vLLM takes handles of GPU memory as text."""
        told = {name: value for name, value in update_info.items() if value is not None}
        if "ipc_handles" in told:
            told["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(told.pop("ipc_handles"))).decode()
        self._to_all(lambda server: _phase(server, "/update_weights", {"update_info": told}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Say nothing: it is finished after the last send, with its version."""

    def _to_all(self, say: Callable[[ServerControl], None]) -> None:
        try:
            for_each(self._servers, say)
        except Exception as error:
            if not self.refusal.done():
                self.refusal.set_result(error)
            raise


def _start(server: ServerControl) -> None:
    pause(server)
    _phase(server, "/start_weight_update", {})


def _phase(server: ServerControl, path: str, body: dict[str, Any]) -> None:
    server.post(path, body, server_answers.phase_was_done, once=True)


def first_free_port(first: int) -> int:
    """Return the first port of this machine from `first` on that nobody listens at."""
    for port in range(first, min(first + _PORTS_TRIED, 65536)):
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return port
    raise EngineError(f"none of the ports {first} to {first + _PORTS_TRIED - 1} is free; set --vllm_group_port")


def _own_address(urls: Sequence[str]) -> str:
    """Return the address of this machine that the servers see, that of the network if one is elsewhere."""
    addresses = [_address_towards(url) for url in urls]
    return next((one for one in addresses if not one.startswith("127.")), addresses[0])


def _address_towards(url: str) -> str:
    parsed = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parsed.hostname, parsed.port or 80))  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this machine has no IPv4 address towards {url} ({error}), and vLLM's transfer meets at one; give the "
            f"server's IPv4 address, or start it without --weight-transfer-config"
        ) from error


def _source(chunk: Mapping[str, torch.Tensor]) -> Any:
    """Return a chunk as vLLM's `WeightSource`."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Chunk(WeightSource):  # type: ignore[misc]  # vLLM is Any to the type checker
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in chunk.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(chunk.items())

    return Chunk()


def choose_weight_route(
    options: ServerOptions,
    *,
    device: torch.device,
    run_id: str,
    save_adapter: Callable[[Path], Any] | None = None,
    process_index: int = 0,
) -> ServerWeights:
    """Choose the adapter alone if there is one to save, vLLM's own transfer if both sides can, else a folder.

    A transfer needs a GPU here, and servers that were all started for it.

    Every training process asks the same servers, and so takes the same route.
    """
    if save_adapter is not None:
        return LoraWeights(options.weights_folder, save_adapter, run_id)
    if device.type == "cuda":
        backend = _common_backend(options)
        if backend is not None:
            return TransferWeights(
                backend,
                device,
                group_port=options.group_port,
                timeout_s=options.timeout_s,
                run_id=run_id,
                process_index=process_index,
            )
    return DiskWeights(options.weights_folder, run_id)


def _common_backend(options: ServerOptions) -> str | None:
    """Return the transfer that all servers were started for, or None; a warning says why some do not count."""
    started_for: set[str | None] = set()
    for url in options.urls:
        server = ServerControl(url, timeout_s=options.timeout_s)
        server.wait_ready(options.ready_timeout_s)
        started_for.add(server.weight_transfer)
    if started_for == {None}:
        return None
    names = ", ".join(sorted(str(one or "none") for one in started_for))
    (only,) = started_for if len(started_for) == 1 else (None,)
    if only not in BACKENDS:
        why = f"the vLLM servers were started for {names} as their weight transfer, not all for one of nccl and ipc"
    elif not vllm_available():
        why = f"the vLLM servers were started for {names}, but vLLM is not installed here"
    else:
        return only
    _log.warning("%s: weights go through a folder", why)
    return None
