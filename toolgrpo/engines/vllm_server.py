"""Generation on one or several running `vllm serve`, over HTTP with token ids.

Invariants:

* Every `sample` ends: with a `Sample` that was checked, with `EngineError`, or by cancellation,
  which closes the connection, whereupon vLLM aborts the request. After `close` no request is open.
* No sample is drawn from stale weights. A server that was restarted has its old ones again; a
  restart shows as a new connection, and whatever comes over a new connection counts only after the
  server was asked which weights it holds. With new ones in the middle of a rollout, requests in
  flight go on with them where they are, and nobody asks or restores meanwhile.
* A request is tried again by this engine and by nobody else, at another server if there is one:
  after a lost connection, a 5xx, or `timeout_s` without an answer, until `timeout_s` have passed
  (twice that with several servers); after an answer that is not believed, `retries` times. A 4xx is
  not: it is our bug.
* When one request is given up, so are all: a rollout with a hole is not trained on. So a run ends
  at the time its first request is given up, not one such time after the other.
* Whoever waits is told: one line per minute for each server that has not answered for so long.

Not covered: a load balancer between trainer and servers (it hides restarts, and weights must reach
every server): give the URL of each server. Anyone who can reach a server in development mode can
replace its weights: keep it on a private network.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.checks import BadAnswer, check_request
from toolgrpo.engines.http_exchange import Answer, NoAnswer, decoded, exchange, new_client
from toolgrpo.engines.server_answers import Completion, completion_sample
from toolgrpo.engines.server_weights import ServerWeights
from toolgrpo.engines.silence import Silence
from toolgrpo.engines.vllm_http import (
    COMPLETIONS,
    SAY_EVERY_S,
    ServerControl,
    completion_bytes,
    completion_payload,
)
from toolgrpo.engines.weight_guard import Lost, WeightGuard
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError

if TYPE_CHECKING:
    import torch


_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_DOWN_FOR_S = 5.0  # how long a server that failed is avoided
_KEEPALIVE_S = 4.0  # vLLM drops idle connections after 5 s; be first
_MAY_PASS = (408, 425, 429)  # of the refusals, those that say "later"
_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _RequestLimits:
    """How long a request is tried."""

    timeout_s: float  # for one server to answer
    retries: int  # after answers that are not believed
    say_every_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a user can ask of this engine."""

    urls: tuple[str, ...] = ()
    ready_timeout_s: float = 240.0
    weights_folder: Path = Path("vllm_weights")  # that the servers can read
    lora_sync: str = "merge"
    timeout_s: float = 900.0  # for a request, its tries included
    retries: int = 3  # after answers that are not believed
    group_port: int = 51216  # the first that is tried, where servers meet the trainer for NCCL


class VLLMServerEngine:
    """The `vllm_server` engine. The constructor waits until every server is ready.

    `vocabulary` is the number of ids the model has; an answer with others is not believed.
    `weights` is the route that `load_weights` takes (None: the servers' weights stay as they are).
    With several training processes only the main one pushes; the others walk the weights and meet
    it in `wait_for_everyone`.
    """

    name = "vllm_server"
    gives_logprobs = True
    same_numbers_as_trainer = False

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocabulary: int,
        weights: ServerWeights | None = None,
        api_key: str | None = None,
        timeout_s: float = 900.0,
        retries: int = 3,
        ready_timeout_s: float = 600.0,
        say_every_s: float = SAY_EVERY_S,
        is_main_process: bool = True,
        wait_for_everyone: Callable[[], None] = lambda: None,
    ) -> None:
        if not urls:
            raise ConfigError("engine vllm_server needs at least one URL, e.g. http://localhost:8000")
        self._servers = [
            ServerControl(url, api_key=api_key, timeout_s=timeout_s, say_every_s=say_every_s) for url in urls
        ]
        _refuse_repeated([server.url for server in self._servers])
        self._vocabulary = vocabulary
        self._weights = weights
        self._limits = _RequestLimits(timeout_s, retries, say_every_s)
        self._is_main_process = is_main_process
        self._wait_for_everyone = wait_for_everyone
        self._run: _ServerRun | None = None
        self.restores = 0
        self._weight_locks = [threading.Lock() for _ in self._servers]  # against a restore during a push
        for server in self._servers:
            server.wait_ready(ready_timeout_s)
            server.warn_if_untested()
            server.check_logprobs_mode()
        served = [server.served_model() for server in self._servers]
        self._served_names = [name for name, _ in served]
        self.max_model_len = min(length for _, length in served)

    @property
    def takes_weights_while_open(self) -> bool:
        return self._weights is not None and self._weights.while_drawing

    async def open(self) -> None:
        if self._run is not None:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        models = [name if self._weights is None else self._weights.model(name) for name in self._served_names]
        guards = [
            WeightGuard(server, self._weights, lock)
            for server, lock in zip(self._servers, self._weight_locks, strict=True)
        ]
        self._run = _ServerRun(self._servers, models, self._vocabulary, guards, self._limits)

    async def sample(self, request: SampleRequest) -> Sample:
        run = self._run
        if run is None:
            raise EngineError("the vllm_server engine is not open")
        check_request(request, self.max_model_len)
        return await run.sample(request)

    async def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            await run.end()
            self.restores += run.restores

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._weights is None:
            raise ConfigError("this vllm_server engine was given no route for weights; pass `weights=DiskWeights(...)`")
        with ExitStack() as held:
            for lock in self._weight_locks:
                held.enter_context(lock)
            for server in self._servers:
                server.wait_ready(self._limits.timeout_s)
            if self._run is not None:
                self._run.note_restarts()
            self._wait_for_everyone()  # from here on nobody restores older ones
            if self._is_main_process:
                self._weights.push(weights, self._servers)
            else:
                self._weights.follow(weights)
            self._wait_for_everyone()

    def shutdown(self) -> None:
        """Leave the servers, which are someone else's."""
        if self._weights is not None:
            self._weights.close()


class _CutShort(Lost):
    """The request's own time ended in the middle of an attempt, which says little of the server."""


class _ServerRun:
    """What lives between `open` and `close`: the connections, and the requests in flight."""

    def __init__(
        self,
        servers: Sequence[ServerControl],
        models: Sequence[str],
        vocabulary: int,
        guards: Sequence[WeightGuard],
        limits: _RequestLimits,
    ) -> None:
        self._servers = servers
        self._models = models
        self._vocabulary = vocabulary
        self._limits = limits
        self._open_requests = [0] * len(servers)
        self._down_until = [0.0] * len(servers)
        self._guards = guards
        self._clients = [new_client(server.headers, keepalive_s=_KEEPALIVE_S) for server in servers]
        self._in_flight: set[asyncio.Task[Sample]] = set()
        self._given_up: EngineError | None = None
        self._silence = [Silence(server.url, limits.timeout_s) for server in servers]
        self._saying = asyncio.get_running_loop().create_task(self._say_silence(), name="vllm-server-silence")

    async def sample(self, request: SampleRequest) -> Sample:
        if self._given_up is not None:
            raise FinalEngineError(str(self._given_up)) from self._given_up
        task = asyncio.get_running_loop().create_task(self._retrying(request))
        self._in_flight.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if self._given_up is not None:
                raise FinalEngineError(str(self._given_up)) from self._given_up
            raise EngineError("the engine was closed while this request was open") from None
        finally:
            self._in_flight.discard(task)

    @property
    def restores(self) -> int:
        return sum(guard.restores for guard in self._guards)

    def note_restarts(self) -> None:
        """Throw away what a server draws that has lost the weights: it is about to get newer ones,
        and would not be found out afterwards.
        """
        for guard in self._guards:
            guard.note_restart()

    async def end(self) -> None:
        """Cancel what is still open, wait until it is gone, and drop the connections."""
        self._saying.cancel()
        in_flight = list(self._in_flight)
        for task in in_flight:
            task.cancel()
        await asyncio.gather(self._saying, *in_flight, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _say_silence(self) -> None:
        """Log a line for each silent server, each time another `say_every_s` have passed."""
        every_s = self._limits.say_every_s
        while True:
            await asyncio.sleep(min(1.0, every_s / 4))
            for silence in self._silence:
                if self._in_flight and (line := silence.due(time.monotonic(), every_s)) is not None:
                    _log.warning(line)

    async def _retrying(self, request: SampleRequest) -> Sample:
        """Try, with pauses, until there is a sample, or too many bad answers, or no more time."""
        servers_asked = min(2, len(self._servers))
        give_up_s = time.monotonic() + self._limits.timeout_s * servers_asked
        pause_s, bad_answers, why = _FIRST_PAUSE_S, 0, ""
        while True:
            number = self._least_busy()
            try:
                sample = await self._attempt_within(number, request, give_up_s)
            except (Lost, BadAnswer) as problem:
                bad_answers += isinstance(problem, BadAnswer)
                why = why if why and isinstance(problem, _CutShort) else str(problem)
                self._note_failure(number, problem)
                if bad_answers > self._limits.retries:
                    so_many = f"{bad_answers} in all" if bad_answers > 1 else "the first"
                    self._give_up(number, f"gave an answer that cannot be used ({so_many}): {why}", request)
                if time.monotonic() + pause_s >= give_up_s:
                    waited_s = self._limits.timeout_s * servers_asked
                    self._give_up(number, f"gave no answer within {waited_s:g} s (--engine_timeout): {why}", request)
            else:
                self._silence[number].answered(time.monotonic(), self._open_requests[number])
                return sample
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _note_failure(self, number: int, problem: Exception) -> None:
        self._down_until[number] = time.monotonic() + _DOWN_FOR_S
        self._silence[number].failed(str(problem))
        if isinstance(problem, BadAnswer):
            _log.warning("an answer of the vLLM server at %s cannot be used: %s", self._servers[number].url, problem)

    def _give_up(self, number: int, problem: str, request: SampleRequest) -> None:
        """End this request and every other one of the rollout."""
        error = FinalEngineError(
            f"the vLLM server at {self._servers[number].url} {problem}. It was a request of {len(request.ids)} tokens "
            f"for at most {request.max_tokens} more. Look at the server's log; when it is well again, resume from the "
            f"last checkpoint."
        )
        self._given_up = error
        for task in self._in_flight:
            if task is not asyncio.current_task():
                task.cancel()
        raise error

    def _least_busy(self) -> int:
        """Return the server with the fewest open requests, one that has just failed last."""
        now = time.monotonic()
        return min(range(len(self._servers)), key=lambda n: (self._down_until[n] > now, self._open_requests[n]))

    async def _attempt_within(self, number: int, request: SampleRequest, give_up_s: float) -> Sample:
        """Try once, for as long as one server may take, and count the request there."""
        limit_s = min(self._limits.timeout_s, give_up_s - time.monotonic())
        self._open_requests[number] += 1
        self._silence[number].asked(time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                return await self._attempt(number, request)
        except TimeoutError:
            raise _CutShort(f"silent for {limit_s:.3g} s") from None
        except asyncio.CancelledError:
            self._silence[number].left(self._open_requests[number] - 1)
            raise
        finally:
            self._open_requests[number] -= 1

    async def _attempt(self, number: int, request: SampleRequest) -> Sample:
        server, guard = self._servers[number], self._guards[number]
        restores_before = guard.restores
        asked = Completion(request, uuid.uuid4().hex, self._models[number], self._vocabulary)
        try:
            answer = await exchange(
                self._clients[number],
                "POST",
                f"{server.url}{COMPLETIONS}",
                most_bytes=completion_bytes(request),
                json=completion_payload(request, asked.model),
                headers={"X-Request-Id": asked.request_id},
                on_connect=guard.check_again,
            )
        except NoAnswer as error:
            raise Lost(str(error)) from error
        if answer.status >= 500 or answer.status in _MAY_PASS:
            raise Lost(f"HTTP {answer.status}: {answer.excerpt}")
        if answer.status == 404:  # an adapter that it has no longer
            guard.check_again()
        await guard.ensure()
        if guard.restores != restores_before:
            raise Lost("it was restarted and has been given the trained weights again")
        self._check_status(server, answer, request)
        return completion_sample(decoded(answer.body), asked)

    def _check_status(self, server: ServerControl, answer: Answer, request: SampleRequest) -> None:
        if not 200 <= answer.status < 300:
            raise FinalEngineError(
                f"the vLLM server at {server.url} refused a request of {len(request.ids)} tokens with "
                f"{answer.status}: {answer.excerpt}"
            )


def _refuse_repeated(urls: Sequence[str]) -> None:
    repeated = sorted({url for url in urls if urls.count(url) > 1})
    if repeated:
        raise ConfigError(f"the vLLM server at {repeated[0]} is given more than once; give each server one URL")
