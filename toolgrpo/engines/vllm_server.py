"""Generation on one or several running `vllm serve`, over HTTP with token ids.

Invariants:

* Every `sample` ends: with a `Sample`, with `EngineError` after bounded retries or at its deadline, or by cancellation,
  which closes the connection, whereupon vLLM aborts the request. After `close` no request is open.
* No sample is drawn from stale weights. A server that was restarted has its old ones again; a restart shows as a new
  connection, and whatever comes over a new connection counts only after the server was asked which weights it holds.
* A request is retried on connection loss and on 5xx, at another server if there is one. A 4xx is not: it is our bug.

Not covered: a load balancer between trainer and servers (it hides restarts, and weights must reach every server): give the
URL of each server. Anyone who can reach a server in development mode can replace its weights: keep it on a private network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.checks import check_request
from toolgrpo.engines.prefix_router import PrefixRouter
from toolgrpo.engines.server_weights import ServerWeights
from toolgrpo.engines.vllm_http import COMPLETIONS, ServerControl, completion_payload, parse_completion
from toolgrpo.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch

__all__ = ["ServerOptions", "VLLMServerEngine"]

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_DOWN_FOR_S = 5.0  # how long a server that failed is avoided
_KEEPALIVE_S = 4.0  # vLLM drops idle connections after 5 s; be first


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a user can ask of this engine."""

    urls: tuple[str, ...] = ()
    ready_timeout_s: float = 240.0
    weights_folder: Path = Path("vllm_weights")  # that the servers can read
    lora_sync: str = "merge"


class VLLMServerEngine:
    """The `vllm_server` engine. The constructor waits until every server is ready.

    `weights` is the road that `load_weights` takes (None: the servers' weights stay as they are). With several training
    processes only the main one pushes; the others walk the weights and meet it in `wait_for_everyone`.
    """

    name = "vllm_server"
    gives_logprobs = True
    same_numbers_as_trainer = False

    def __init__(
        self,
        urls: Sequence[str],
        *,
        weights: ServerWeights | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 1800.0,
        retry_for_s: float = 120.0,
        ready_timeout_s: float = 600.0,
        is_main_process: bool = True,
        wait_for_everyone: Callable[[], None] = lambda: None,
    ) -> None:
        if not urls:
            raise ConfigError("engine vllm_server needs at least one URL, e.g. http://localhost:8000")
        self._servers = [ServerControl(url, api_key=api_key) for url in urls]
        self._weights = weights
        self._request_timeout_s = request_timeout_s
        self._retry_for_s = retry_for_s
        self._is_main_process = is_main_process
        self._wait_for_everyone = wait_for_everyone
        self._run: _Run | None = None
        for server in self._servers:
            server.wait_ready(ready_timeout_s)
            server.warn_if_untested()
            server.check_logprobs_mode()
        served = [server.served_model() for server in self._servers]
        self._served_names = [name for name, _ in served]
        self.max_model_len = min(length for _, length in served)

    async def open(self) -> None:
        if self._run is not None:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        self._run = _Run(self._servers, self._served_names, self._weights, self._retry_for_s)

    async def sample(self, request: SampleRequest) -> Sample:
        run = self._run
        if run is None:
            raise EngineError("the vllm_server engine is not open")
        check_request(request, self.max_model_len)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await run.sample(request)
        except TimeoutError as error:
            raise EngineError(
                f"no vLLM server answered a request of {len(request.ids)} tokens within {self._request_timeout_s:g} s"
            ) from error

    async def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            await run.end()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._weights is None:
            raise ConfigError("this vllm_server engine was given no road for weights; pass `weights=DiskWeights(...)`")
        if self._is_main_process:
            for server in self._servers:
                server.wait_ready(self._retry_for_s)
            self._weights.push(weights, self._servers)
        else:
            self._weights.follow(weights)
        self._wait_for_everyone()

    def shutdown(self) -> None:
        """Drop the connections; the servers were started by someone else and go on."""
        for server in self._servers:
            server.close()


class _Lost(Exception):
    """One attempt failed in a way that another attempt may mend."""


class _Run:
    """What lives between `open` and `close`: the connections, the router, and the requests in flight."""

    def __init__(
        self,
        servers: Sequence[ServerControl],
        served_names: Sequence[str],
        weights: ServerWeights | None,
        retry_for_s: float,
    ) -> None:
        self._servers = servers
        self._models = [name if weights is None else weights.model(name) for name in served_names]
        self._weights = weights
        self._retry_for_s = retry_for_s
        self._router = PrefixRouter(len(servers))
        self._down_until = [0.0] * len(servers)
        self._guards = [_WeightGuard(server, weights) for server in servers]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S)
        # The deadline of a request is the engine's; only connecting has one of its own.
        timeout = httpx.Timeout(None, connect=10.0)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, headers=servers[0].headers)
        self._in_flight: set[asyncio.Task[Sample]] = set()

    async def sample(self, request: SampleRequest) -> Sample:
        task = asyncio.get_running_loop().create_task(self._retrying(request))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise EngineError("the engine was closed while this request was open") from None
        finally:
            self._in_flight.discard(task)

    async def end(self) -> None:
        """Cancel what is still open, wait until it is gone, and drop the connections."""
        in_flight = list(self._in_flight)
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
        await self._client.aclose()

    async def _retrying(self, request: SampleRequest) -> Sample:
        """Attempts with back-off, until one succeeds or failures have gone on for too long."""
        first_failure_s: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            number = self._router.choose(request.ids, self._down())
            self._router.open_requests[number] += 1
            try:
                return await self._attempt(number, request)
            except _Lost as lost:
                now = time.monotonic()
                first_failure_s = now if first_failure_s is None else first_failure_s
                self._down_until[number] = now + _DOWN_FOR_S
                if now + pause_s - first_failure_s > self._retry_for_s:
                    raise EngineError(
                        f"the vLLM server at {self._servers[number].url} failed for {self._retry_for_s:g} s: {lost}. "
                        f"Look at its log; when it is up again, resume from the last checkpoint."
                    ) from lost
            finally:
                self._router.open_requests[number] -= 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _down(self) -> set[int]:
        now = time.monotonic()
        return {number for number, until in enumerate(self._down_until) if until > now}

    async def _attempt(self, number: int, request: SampleRequest) -> Sample:
        server, guard = self._servers[number], self._guards[number]
        restores_before = guard.restores
        connected_s: float | None = None

        async def trace(event: str, _: Any) -> None:
            nonlocal connected_s
            if event == "connection.connect_tcp.complete":
                connected_s = time.monotonic()

        try:
            response = await self._client.post(
                f"{server.url}{COMPLETIONS}",
                json=completion_payload(request, self._models[number]),
                extensions={"trace": trace},
            )
        except httpx.TransportError as error:
            raise _Lost(f"{type(error).__name__}: {error}") from error
        if response.status_code >= 500:
            raise _Lost(f"HTTP {response.status_code}: {response.text[:500]}")
        unknown_model = response.status_code == 404
        if connected_s is not None or unknown_model:
            asked_since_s = time.monotonic() if unknown_model or connected_s is None else connected_s
            await guard.ensure(asked_since_s)
        if guard.restores != restores_before:
            raise _Lost("it was restarted and has been given the trained weights again")
        if not response.is_success:
            raise EngineError(
                f"the vLLM server at {server.url} refused a request of {len(request.ids)} tokens with "
                f"{response.status_code}: {response.text[:500]}"
            )
        try:
            return parse_completion(response.json(), request)
        except EngineError as error:
            raise _Lost(str(error)) from error


class _WeightGuard:
    """Knows whether one server still holds the trained weights, and gives them back when it does not."""

    def __init__(self, server: ServerControl, weights: ServerWeights | None) -> None:
        self._server = server
        self._weights = weights
        self._held_at_s = -1.0
        self._lock = asyncio.Lock()
        self.restores = 0

    async def ensure(self, since_s: float) -> None:
        """Ask the server, unless it was asked after `since_s`; `_Lost` if it cannot be reached."""
        if self._weights is None:
            return
        async with self._lock:
            if self._held_at_s > since_s:
                return
            asked_s = time.monotonic()
            try:
                if not await asyncio.to_thread(self._weights.holds, self._server):
                    await asyncio.to_thread(self._weights.restore, self._server)
                    self.restores += 1
            except EngineError as error:
                raise _Lost(str(error)) from error
            self._held_at_s = asked_s
