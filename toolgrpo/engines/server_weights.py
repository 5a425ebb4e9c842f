"""How the trainer's weights reach a `vllm serve`: three routes, one small protocol.

* `DiskWeights`: written to a folder that the servers can read, then reloaded by them. Works
  everywhere.
* `LoraWeights`: only the adapter is written; the servers load it under a new name beside the base
  model.
* `TransferWeights` (`server_transfer.py`): from GPU to GPU, by vLLM's own engines.

Invariants: after `push` every server has the new weights and no cached prefix of the old ones;
`holds` tells a server that lost them (it was restarted); `restore` gives them back, or says that it
cannot. Each version has a name of its own, so an old one is never taken for a new one.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from toolgrpo.engines import server_answers
from toolgrpo.engines.server_transfer import TransferWeights
from toolgrpo.engines.server_update import (
    Weights,
    chunks,
    for_each,
    forget_prefixes,
    holds_version,
    name_version,
    pause,
    resume,
)
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.engines.vllm_options import vllm_available
from toolgrpo.engines.vllm_transfer import BACKENDS
from toolgrpo.errors import EngineError

_log = getLogger(__name__)


class ServerWeights(Protocol):
    """One route for weights."""

    @property
    def while_drawing(self) -> bool:
        """Whether `push` may come while requests are open, which then go on with the new weights."""
        ...

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

    def close(self) -> None:
        """Give back what is held for the next `push`."""
        ...


class DiskWeights:
    """Weights through a folder. Processes that share servers share `folder` and `run_id`."""

    while_drawing = True

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        self._folder = folder.absolute()
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._version = 0

    def model(self, served: str) -> str:
        return served

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        self._version += 1
        self._path.mkdir(parents=True)
        for number, chunk in enumerate(chunks(weights)):
            save_file({name: tensor.cpu() for name, tensor in chunk.items()}, self._path / f"{number:05}.safetensors")
        for_each(servers, self.restore)
        for old in self._folder.glob(f"{self._run_id}-*"):
            if old != self._path:
                shutil.rmtree(old)

    def follow(self, weights: Weights) -> None:
        self._version += 1
        for _ in weights:
            pass

    def holds(self, server: ServerControl) -> bool:
        return self._version == 0 or holds_version(server, self._path.name)

    def restore(self, server: ServerControl) -> None:
        path = self._path  # of this version to the end, however long the server takes
        if not path.is_dir():
            raise EngineError(f"{path} is gone, so the vLLM server at {server.url} cannot be given its weights")
        server.check_reloadable()
        pause(server)
        method = "toolgrpo_reload_weights" if server.on_cpu else "reload_weights"
        reload = {"method": method, "kwargs": {"weights_path": str(path)}}
        server.post("/collective_rpc", reload, server_answers.accepted)
        forget_prefixes(server)
        name_version(server, path.name)
        resume(server)

    def close(self) -> None:
        """Leave the folder: a server that is restarted may need it."""

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._run_id}-{self._version}"


class LoraWeights:
    """A LoRA adapter through a folder; `save_adapter` writes it there in PEFT's format.

    The servers run with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`. `save_adapter`
    is called in the main process alone, so it must not be collective (no ZeRO-3, no FSDP). A server
    holds one adapter at a time, so none is replaced while requests are open.
    """

    while_drawing = False

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
        for_each(servers, self.restore)
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

    def close(self) -> None:
        """Leave the adapter: a server that is restarted may need it."""

    def _name(self, version: int) -> str:
        return f"{self._run_id}-{version}"


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
    process_index: int = 0,
) -> ServerWeights:
    """Choose the adapter alone if there is one to save, vLLM's own transfer if both sides can, else a folder.

    A transfer needs a GPU here, and servers that were all started for it.

    Every training process asks the same servers, and so takes the same route.
    """
    if save_adapter is not None:
        return LoraWeights(folder, save_adapter, run_id)
    if device.type == "cuda":
        backend = _common_backend(urls, ready_timeout_s, timeout_s)
        if backend is not None:
            return TransferWeights(
                backend,
                device,
                group_port=group_port,
                timeout_s=timeout_s,
                run_id=run_id,
                process_index=process_index,
            )
    return DiskWeights(folder, run_id)


def _common_backend(urls: Sequence[str], ready_timeout_s: float, timeout_s: float) -> str | None:
    """Return the transfer that all servers were started for, or None; a warning says why some do not count."""
    started_for: set[str | None] = set()
    for url in urls:
        server = ServerControl(url, timeout_s=timeout_s)
        server.wait_ready(ready_timeout_s)
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
