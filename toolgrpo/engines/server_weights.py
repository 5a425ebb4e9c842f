"""How the trainer's weights reach a `vllm serve`: three routes, one small protocol.

* `DiskWeights`: written to a folder that the servers can read, then reloaded by them. Works
  everywhere.
* `LoraWeights`: only the adapter is written; the servers load it under a new name beside the base
  model.
* `NcclWeights`: broadcast from GPU to GPU, through TRL's client. **Never run by this project's
  tests**: it needs two GPUs.

Invariants: after `push` every server has the new weights and no cached prefix of the old ones;
`holds` tells a server that lost them (it was restarted); `restore` gives them back, or says that it
cannot. Each version has a name of its own, so an old one is never taken for a new one.
"""

from __future__ import annotations

import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from toolgrpo.engines import server_answers
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.errors import EngineError
from toolgrpo.trl_parts import nccl_client

__all__ = ["DiskWeights", "LoraWeights", "NcclWeights", "ServerWeights", "choose_weight_route", "first_free_port"]

_CHUNK_BYTES = 1 << 30
_CACHE_RESET_TRIES = 50
_PORTS_TRIED = 100

Weights = Iterable[tuple[str, torch.Tensor]]


class ServerWeights(Protocol):
    """One route for weights."""

    def model(self, served: str) -> str:
        """Return the model name that requests ask for."""
        ...

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None: ...

    def follow(self, weights: Weights) -> None:
        """Take part in a push that the main process makes: gathering weights is collective."""
        ...

    def holds(self, server: ServerControl) -> bool:
        """Return whether the server still has the last version."""
        ...

    def restore(self, server: ServerControl) -> None:
        """Give the last version to a server that lost it."""
        ...


class DiskWeights:
    """Weights through a folder. Processes that share servers share `folder` and `run_id`."""

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        self._folder = folder.absolute()
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._version = 0

    def model(self, served: str) -> str:
        return served

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        self._version += 1
        self._path.mkdir(parents=True)
        for number, chunk in enumerate(_chunks(weights)):
            save_file({name: tensor.cpu() for name, tensor in chunk.items()}, self._path / f"{number:05}.safetensors")
        _for_each(servers, self.restore)
        for old in self._folder.glob(f"{self._run_id}-*"):
            if old != self._path:
                shutil.rmtree(old)

    def follow(self, weights: Weights) -> None:
        self._version += 1
        for _ in weights:
            pass

    def holds(self, server: ServerControl) -> bool:
        return self._version == 0 or _holds(server, self._path.name)

    def restore(self, server: ServerControl) -> None:
        path = self._path  # of this version to the end, however long the server takes
        if not path.is_dir():
            raise EngineError(f"{path} is gone, so the vLLM server at {server.url} cannot be given its weights")
        server.check_reloadable()
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        server.post("/collective_rpc", reload, server_answers.accepted)
        if server.on_cpu:
            server.post("/collective_rpc", {"method": "toolgrpo_repack_tied_heads"}, server_answers.accepted)
        _finish(server, path.name)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._run_id}-{self._version}"


class LoraWeights:
    """A LoRA adapter through a folder; `save_adapter` writes it there in PEFT's format.

    The servers run with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`. `save_adapter`
    is called in the main process alone, so it must not be collective (no ZeRO-3, no FSDP).
    """

    def __init__(self, folder: Path, save_adapter: Callable[[Path], Any], run_id: str | None = None) -> None:
        self._folder = folder.absolute()
        self._save_adapter = save_adapter
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._version = 0

    def model(self, served: str) -> str:
        return self._name(self._version) if self._version else served

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        """Send what `save_adapter` writes; `weights`, the merged ones, are not even walked."""
        self._version += 1
        self._save_adapter(self._folder / self._name(self._version))
        _for_each(servers, self.restore)
        old = self._name(self._version - 1)
        for server in servers:
            if old in server.adapters():
                server.post("/v1/unload_lora_adapter", {"lora_name": old}, once=True)
        shutil.rmtree(self._folder / old, ignore_errors=True)

    def follow(self, weights: Weights) -> None:
        self._version += 1

    def holds(self, server: ServerControl) -> bool:
        return self._version == 0 or self._name(self._version) in server.adapters()

    def restore(self, server: ServerControl) -> None:
        name = self._name(self._version)
        server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._folder / name)}, once=True)
        if name not in server.adapters():
            raise EngineError(f"the vLLM server at {server.url} was given the adapter {name}, but does not list it")

    def _name(self, version: int) -> str:
        return f"{self._run_id}-{version}"


class NcclWeights:
    """Weights from GPU to GPU through TRL's `VLLMClient`, in chunks.

    The servers run with an NCCL weight-transfer config.

    Thin on purpose: the rendezvous and the broadcast are TRL's. It needs a GPU for the trainer and
    one for each server, so it has not been run on the machines this project is tested on. Server
    number n meets the trainer at port `group_port` + n (TRL's `vllm_group_port`), or the next one
    that is free.
    """

    def __init__(self, device: torch.device, *, group_port: int, run_id: str | None = None) -> None:
        self._device = device
        self._group_port = group_port
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._version = 0
        self._clients: dict[str, Any] = {}

    def model(self, served: str) -> str:
        return served

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        clients = [self._client(server, number) for number, server in enumerate(servers)]
        self._version += 1
        with ExitStack() as updates:
            for client in clients:
                updates.enter_context(client.weight_update())
            for chunk in _chunks(weights):
                metadata = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in chunk.items()]
                for client in clients:
                    client.update_named_params(metadata, iter(chunk.items()))
        for server in servers:
            _finish(server, self._name)

    def follow(self, weights: Weights) -> None:
        self._version += 1
        for _ in weights:
            pass

    def holds(self, server: ServerControl) -> bool:
        return self._version == 0 or _holds(server, self._name)

    def restore(self, server: ServerControl) -> None:
        raise EngineError(
            f"the vLLM server at {server.url} was restarted and has lost the trained weights, and with NCCL its place in "
            f"the group. Resume the training from the last checkpoint."
        )

    @property
    def _name(self) -> str:
        return f"{self._run_id}-{self._version}"

    def _client(self, server: ServerControl, number: int) -> Any:
        if server.url not in self._clients:
            client = nccl_client(server.url, group_port=first_free_port(self._group_port + number))
            client.init_communicator(device=self._device)
            self._clients[server.url] = client
        return self._clients[server.url]


def choose_weight_route(
    urls: Sequence[str],
    *,
    device: torch.device,
    folder: Path,
    run_id: str,
    save_adapter: Callable[[Path], Any] | None = None,
    ready_timeout_s: float,
    timeout_s: float,
    group_port: int,
) -> ServerWeights:
    """Choose the adapter alone if there is one to save, NCCL if both sides can, else a folder.

    NCCL needs a GPU here, and servers that were started for it.

    Every training process asks the same servers, and so takes the same route.
    """
    if save_adapter is not None:
        return LoraWeights(folder, save_adapter, run_id)
    if device.type == "cuda" and all(_takes_nccl(url, ready_timeout_s, timeout_s) for url in urls):
        return NcclWeights(device, group_port=group_port, run_id=run_id)
    return DiskWeights(folder, run_id)


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


def _takes_nccl(url: str, ready_timeout_s: float, timeout_s: float) -> bool:
    server = ServerControl(url, timeout_s=timeout_s)
    server.wait_ready(ready_timeout_s)
    return server.takes_nccl


def _chunks(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of the tensors, about a GiB at a time.

    A gathered tensor lives only until the next one is asked for.
    """
    chunk: dict[str, torch.Tensor] = {}
    n_bytes = 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        n_bytes += tensor.nbytes
        if n_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, n_bytes = {}, 0
    if chunk:
        yield chunk


def _for_each(servers: Sequence[ServerControl], action: Callable[[ServerControl], None]) -> None:
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(action, servers))


def _finish(server: ServerControl, version: str) -> None:
    """Forget every cached prefix, and only then name the version that is now loaded."""
    for _ in range(_CACHE_RESET_TRIES):
        if server.post("/reset_prefix_cache", read=server_answers.cache_was_emptied):
            named = partial(server_answers.named_version, version)
            server.post("/update_weight_version", {"new_version": version}, named)
            return
        time.sleep(0.1)  # blocks are still held by requests that are being aborted
    raise EngineError(
        f"the vLLM server at {server.url} could not forget its cached prefixes: requests of someone else are running "
        f"there. A server that is trained with must not be shared."
    )


def _holds(server: ServerControl, version: str) -> bool:
    return bool(server.get("/weight_info", server_answers.version_of_weights) == version)
