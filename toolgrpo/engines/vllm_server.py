"""Generation on one or several running `vllm serve`, over HTTP with token ids.

Invariants:

* Every `sample` ends: with a `Sample` that was checked, with `EngineError`, or by cancellation,
  which closes the connection, whereupon vLLM aborts the request. After `close` no request is open.
* No sample is drawn from stale weights, also of a server that was restarted (`server_link.py`). With
  new ones in the middle of a rollout, requests in flight go on with them where they are.
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
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from logging import getLogger
from typing import TYPE_CHECKING

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.checks import BadAnswer, check_request
from toolgrpo.engines.server_link import CutShort, Lost, ServerLink
from toolgrpo.engines.server_weights import ServerWeights
from toolgrpo.engines.vllm_http import SAY_EVERY_S, ServerControl
from toolgrpo.engines.vllm_options import ServerOptions
from toolgrpo.errors import ConfigError, EngineError, FinalEngineError

if TYPE_CHECKING:
    import torch


_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_log = getLogger(__name__)


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
        options: ServerOptions,
        *,
        vocabulary: int,
        max_model_len: int | None = None,
        weights: ServerWeights | None = None,
        say_every_s: float = SAY_EVERY_S,
        is_main_process: bool = True,
        wait_for_everyone: Callable[[], None] = lambda: None,
    ) -> None:
        if not options.urls:
            raise ConfigError("engine vllm_server needs at least one URL, e.g. http://localhost:8000")
        self._servers = [
            ServerControl(url, timeout_s=options.timeout_s, say_every_s=say_every_s) for url in options.urls
        ]
        urls = [server.url for server in self._servers]
        if repeated := sorted({url for url in urls if urls.count(url) > 1}):
            raise ConfigError(f"the vLLM server at {repeated[0]} is given more than once; give each server one URL")
        self._vocabulary = vocabulary
        self._weights = weights
        self._options = options
        self._say_every_s = say_every_s
        self._is_main_process = is_main_process
        self._wait_for_everyone = wait_for_everyone
        self._run: _ServerRun | None = None
        self.restores = 0
        for server in self._servers:
            server.wait_ready(options.ready_timeout_s)
            server.warn_if_untested()
            server.check_logprobs_mode()
        served = min(server.base_model.max_model_len or 0 for server in self._servers)
        if max_model_len is not None and max_model_len > served:
            raise ConfigError(
                f"vllm_max_model_length is {max_model_len}, but the servers have windows of {served} tokens; start them "
                f"with --max-model-len {max_model_len}, or lower it"
            )
        self.max_model_len = max_model_len or served

    @property
    def takes_weights_while_open(self) -> bool:
        return self._weights is not None and self._weights.while_drawing

    async def open(self) -> None:
        if self._run is not None:
            raise EngineError("the engine is already open; close the rollout that uses it first")
        options = self._options
        links = [ServerLink(server, self._weights, self._vocabulary, options.timeout_s) for server in self._servers]
        self._run = _ServerRun(links, options, self._say_every_s)

    async def sample(self, request: SampleRequest) -> Sample:
        run = self._run
        if run is None:
            raise EngineError("the vllm_server engine is not open")
        check_request(request, self.max_model_len)
        if request.seed is None and len(self._servers) > 1:  # servers that were started alike would draw alike
            request = replace(request, seed=secrets.randbits(62))
        return await run.sample(request)

    async def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            await run.end()
            self.restores += sum(link.restores for link in run.links)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._weights is None:
            raise ConfigError("this vllm_server engine has no route for weights; pass `weights=DiskWeights(...)`")
        with ExitStack() as held:
            for server in self._servers:
                held.enter_context(server.weight_lock)
            for server in self._servers:
                server.wait_ready(self._options.timeout_s)
            for link in () if self._run is None else self._run.links:
                link.note_restart()
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


class _ServerRun:
    """The requests in flight between `open` and `close`, and the links to the servers."""

    def __init__(self, links: Sequence[ServerLink], options: ServerOptions, say_every_s: float) -> None:
        self.links = links
        self.in_flight: set[asyncio.Task[Sample]] = set()
        # one that hangs takes `timeout_s`; then another is asked
        self._longest_s = options.timeout_s * min(2, len(links))
        self._retries = options.retries
        self._say_every_s = say_every_s
        self._given_up: EngineError | None = None
        self._saying = asyncio.get_running_loop().create_task(self._say_silence(), name="vllm-server-silence")

    async def sample(self, request: SampleRequest) -> Sample:
        if self._given_up is not None:
            raise FinalEngineError(str(self._given_up)) from self._given_up
        task = asyncio.get_running_loop().create_task(self._retrying(request))
        self.in_flight.add(task)
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
            self.in_flight.discard(task)

    async def end(self) -> None:
        """Cancel what is still open, wait until it is gone, and drop the connections."""
        ending = [self._saying, *self.in_flight]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for link in self.links:
            await link.close()

    async def _say_silence(self) -> None:
        """Log a line for each silent server, each time another `say_every_s` have passed."""
        while True:
            await asyncio.sleep(min(1.0, self._say_every_s / 4))
            for link in self.links:
                if self.in_flight and (line := link.silence.due(time.monotonic(), self._say_every_s)) is not None:
                    _log.warning(line)

    async def _retrying(self, request: SampleRequest) -> Sample:
        """Try, with pauses, until there is a sample, or too many bad answers, or no more time."""
        give_up_s = time.monotonic() + self._longest_s
        pause_s, bad_answers, why = _FIRST_PAUSE_S, 0, ""
        while True:
            link = min(self.links, key=lambda one: one.load)
            try:
                return await link.sample(request, give_up_s - time.monotonic())
            except (Lost, BadAnswer) as problem:
                bad_answers += isinstance(problem, BadAnswer)
                why = why if why and isinstance(problem, CutShort) else str(problem)
            if bad_answers > self._retries:
                so_many = f"{bad_answers} in all" if bad_answers > 1 else "the first"
                self._give_up(link, f"gave an answer that cannot be used ({so_many}): {why}", request)
            if time.monotonic() + pause_s >= give_up_s:
                self._give_up(link, f"gave no answer within {self._longest_s:g} s (--engine_timeout): {why}", request)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _give_up(self, link: ServerLink, problem: str, request: SampleRequest) -> None:
        """End this request and every other one of the rollout."""
        error = FinalEngineError(
            f"the vLLM server at {link.url} {problem}. It was a request of {len(request.ids)} tokens "
            f"for at most {request.max_tokens} more. Look at the server's log; when it works again, resume from the "
            f"last checkpoint."
        )
        self._given_up = error
        for task in self.in_flight:
            if task is not asyncio.current_task():
                task.cancel()
        raise error
