"""Weights to a `vllm serve` without a disk in between: vLLM's own transfer, in its four phases.

    meet      /init_weight_transfer_engine   once, at a port that is free; anew after a restart
    start     /start_weight_update
    take      /update_weights                for each chunk of about a GiB
    finish    /finish_weight_update          with the version of the weights

The servers are paused around the last three. `nccl` goes from the GPU of process 0 to those of the
servers, all in one group; with `ipc` they are the same GPUs, each process giving what lies on its own.

Invariants: no call is made twice; before an update every server is asked for its version, and one
that has another was restarted, so that all meet again; one that is restarted in the middle of a
rollout ends it, since nobody walks the weights then.

**Not run by this project's tests: the bytes, which need GPUs** (`vllm_transfer.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
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
    holds_version,
    pause,
    resume,
)
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.engines.vllm_options import vllm_available
from toolgrpo.engines.vllm_transfer import BACKENDS, Meeting, WeightSender
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError

_PORTS_TRIED = 100
_log = getLogger(__name__)


class TransferWeights:
    """Weights through the engines that the servers were started for, `nccl` or `ipc`.

    `group_port` is the first port that is tried for the meeting (TRL's `vllm_group_port`).
    """

    while_drawing = True

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
        self._backend = backend
        self._device = device
        self._group_port = group_port
        self._timeout_s = timeout_s
        self._run_id = run_id
        self._process_index = process_index
        self._version = 0
        self._sender: WeightSender | None = None

    def model(self, served: str) -> str:
        return served

    def push(self, weights: Weights, servers: Sequence[ServerControl]) -> None:
        sender = self._met(servers)
        self._version += 1
        for_each(servers, _start)
        for chunk in chunks(weights):
            sender.send(chunk)
        for_each(servers, self._finish)

    def follow(self, weights: Weights) -> None:
        self._version += 1
        if self._backend == "nccl":
            for _ in weights:
                pass
            return
        if self._sender is None:
            self._sender = self._open(_Servers([]), None)
        for chunk in chunks(weights):
            self._sender.send(chunk)

    def holds(self, server: ServerControl) -> bool:
        return self._version == 0 or holds_version(server, self._name)

    def restore(self, server: ServerControl) -> None:
        raise FinalEngineError(
            f"the vLLM server at {server.url} was restarted and has lost the trained weights, and with them its place "
            f"in the {self._backend} transfer. Resume the training from the last checkpoint; without "
            f"--weight-transfer-config on the servers a restart costs nothing."
        )

    def close(self) -> None:
        """Leave the group, if there is one."""
        if self._sender is not None:
            self._sender.end()
        self._sender = None

    @property
    def _name(self) -> str:
        return f"{self._run_id}-{self._version}"

    def _met(self, servers: Sequence[ServerControl]) -> WeightSender:
        """Return what sends to these servers, meeting them if it has not, or not all of them still know it."""
        if self._sender is not None:
            lost = [server.url for server in servers if not self.holds(server)]
            if not lost:
                return self._sender
            _log.warning("the vLLM server at %s was restarted; the weight transfer is set up anew", ", ".join(lost))
            self.close()
        those = _Servers(servers)
        meeting = None
        if self._backend == "nccl":
            meeting = Meeting(
                _own_address([server.url for server in servers]),
                first_free_port(self._group_port),
                1 + those.n_workers,
            )
        self._sender = self._open(those, meeting)
        return self._sender

    def _open(self, servers: _Servers, meeting: Meeting | None) -> WeightSender:
        return WeightSender(
            self._backend,
            servers,
            rank=self._process_index,
            device=self._device,
            timeout_s=self._timeout_s,
            meeting=meeting,
        )

    def _finish(self, server: ServerControl) -> None:
        """Forget every cached prefix, and only then name the version; then let it go on."""
        forget_prefixes(server)
        _phase(server, "/finish_weight_update", {"weight_version": self._name})
        resume(server)


class _Servers:
    """The servers of one transfer, each with its own place in the group."""

    def __init__(self, servers: Sequence[ServerControl]) -> None:
        self._servers = servers
        self._first_rank: dict[str, int] = {}
        self.n_workers = 0
        for server in servers:
            self._first_rank[server.url] = 1 + self.n_workers  # the trainer is 0
            self.n_workers += server.get("/get_world_size", server_answers.world_size)

    def meet(self, init_info: dict[str, Any]) -> None:
        """Say where to meet, to all at a time: each waits for the others."""
        for_each(self._servers, partial(self._meet_one, init_info))

    def _meet_one(self, init_info: dict[str, Any], server: ServerControl) -> None:
        place = {"rank_offset": self._first_rank[server.url]} if "rank_offset" in init_info else {}
        _phase(server, "/init_weight_transfer_engine", {"init_info": {**init_info, **place}})

    def take(self, update_info: dict[str, Any]) -> None:
        """Say what comes now, to all at a time."""
        for_each(self._servers, lambda server: _phase(server, "/update_weights", {"update_info": update_info}))


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
