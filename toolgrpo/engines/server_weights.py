"""Routes of the trainer's weights to a `vllm serve`: what they share, and two of its three routes.

* `DiskWeights`: written to a folder that the servers can read, then reloaded by them. Works
  everywhere.
* `LoraWeights`: only the adapter is written; the servers load it under a new name beside the base
  model.
* `TransferWeights` (`server_transfer.py`): from GPU to GPU, by vLLM's own engines.

Invariants: after `push` every server has the new weights and no cached prefix of the old ones;
`holds` tells a server that lost them (it was restarted); `restore` gives them back, or says that it
cannot. Each version has a name of its own, so an old one is never taken for a new one.

An update pauses the server, forgets its prefixes, names the new weights and resumes. A paused server
keeps its requests and computes nothing: those in flight go on with the new weights where they were,
and vLLM computes their caches anew. A server whose update failed stays paused, so that nobody draws
from half of it; the next update, of this run or another, resumes it.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toolgrpo.engines import server_answers
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.errors import EngineError

_CHUNK_BYTES = 1 << 30
_CACHE_RESET_TRIES = 50

Weights = Iterable[tuple[str, torch.Tensor]]


class ServerWeights(ABC):
    """One route for weights. Processes that share servers share `run_id`."""

    while_drawing = True
    """Whether `push` may come while requests are open, which then go on with the new weights."""

    def __init__(self, run_id: str | None = None) -> None:
        self._run_id = run_id or uuid.uuid4().hex[:12]
        self._version = 0

    @abstractmethod
    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        """Give all servers the next version."""

    @abstractmethod
    def restore(self, server: ServerControl) -> None:
        """Give the last version to a server that lost it."""

    def follow(self, weights: Weights) -> None:
        """Take part in a push that the main process makes: gathering weights is collective."""
        self._version += 1
        for _ in weights:
            pass

    def model(self, served: str) -> str:
        """Return the model name that requests ask for."""
        return served

    def holds(self, server: ServerControl) -> bool:
        """Return whether the server still has the last version; one that was restarted names another."""
        if self._version == 0:
            return True
        return bool(server.get("/weight_info", server_answers.version_of_weights) == self._name)

    def close(self) -> None:  # noqa: B027  # most routes hold nothing
        """Give back what is held for the next `push`; files stay, for a server that is restarted may need them."""

    @property
    def _name(self) -> str:
        """The name of the last version."""
        return f"{self._run_id}-{self._version}"


class DiskWeights(ServerWeights):
    """Weights through a folder. Processes that share servers share `folder`, too."""

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        super().__init__(run_id)
        self._folder = folder.absolute()

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        self._version += 1
        path = self._folder / self._name
        path.mkdir(parents=True)
        for number, chunk in enumerate(chunks(weights)):
            save_file({name: tensor.cpu() for name, tensor in chunk.items()}, path / f"{number:05}.safetensors")
        for_each(servers, self.restore)
        remove_others(path)

    def restore(self, server: ServerControl) -> None:
        path = self._folder / self._name  # of this version to the end, however long the server takes
        if not path.is_dir():
            raise EngineError(f"{path} is gone, so the vLLM server at {server.url} cannot be given its weights")
        server.check_reloadable()
        pause(server)
        method = "toolgrpo_reload_weights" if server.on_cpu else "reload_weights"
        reload = {"method": method, "kwargs": {"weights_path": str(path)}}
        server.post("/collective_rpc", reload, server_answers.accepted)
        forget_prefixes(server)
        named = partial(server_answers.named_version, path.name)
        server.post("/update_weight_version", {"new_version": path.name}, named)
        resume(server)


class LoraWeights(ServerWeights):
    """A LoRA adapter through a folder; `save_adapter` writes it there in PEFT's format.

    The servers run with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`. `save_adapter`
    is called in the main process alone, so it must not be collective (no ZeRO-3, no FSDP). A server
    holds one adapter at a time, so none is replaced while requests are open.
    """

    while_drawing = False

    def __init__(self, folder: Path, save_adapter: Callable[[Path], Any], run_id: str | None = None) -> None:
        super().__init__(run_id)
        self._folder = folder.absolute()
        self._save_adapter = save_adapter

    def model(self, served: str) -> str:
        return self._name if self._version else served

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        """Send what `save_adapter` writes; `weights`, the merged ones, are not even walked."""
        old = self._name
        self._version += 1
        self._save_adapter(self._folder / self._name)
        for_each(servers, self.restore)
        for server in servers:
            if old in server.adapters():
                server.post("/v1/unload_lora_adapter", {"lora_name": old}, once=True)
        remove_others(self._folder / self._name)

    def follow(self, weights: Weights) -> None:
        self._version += 1

    def holds(self, server: ServerControl) -> bool:
        return self._version == 0 or self._name in server.adapters()

    def restore(self, server: ServerControl) -> None:
        name = self._name
        server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._folder / name)}, once=True)
        if name not in server.adapters():
            raise EngineError(f"the vLLM server at {server.url} was given the adapter {name}, but does not list it")


def pause(server: ServerControl) -> None:
    """Let its requests stay where they are; also where it is paused already."""
    server.post("/pause?mode=keep", read=partial(server_answers.status_is, "paused"))


def resume(server: ServerControl) -> None:
    """Let its requests go on."""
    server.post("/resume", read=partial(server_answers.status_is, "resumed"))


def forget_prefixes(server: ServerControl) -> None:
    """Forget every cached prefix of a paused server, those of requests in flight among them."""
    for _ in range(_CACHE_RESET_TRIES):
        if server.post("/reset_prefix_cache?reset_running_requests=true", read=server_answers.cache_was_emptied):
            return
        time.sleep(0.1)  # a transfer of cached blocks is on its way
    raise EngineError(
        f"the vLLM server at {server.url} could not drop its cached prefixes, which older weights "
        f"computed. Restart it, and resume from the last checkpoint."
    )


def remove_others(version: Path) -> None:
    """Remove every other version from its folder, also those of a run that this one resumes."""
    for old in version.parent.iterdir():
        if old != version and re.fullmatch(r"\w+-\d+", old.name):
            shutil.rmtree(old, ignore_errors=True)


def for_each(servers: Sequence[ServerControl], action: Callable[[ServerControl], None]) -> None:
    """Do it with all servers at a time."""
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(action, servers))


def chunks(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
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
