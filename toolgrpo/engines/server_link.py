"""One `vllm serve` during a rollout: what is open there, how long it is silent, and whose weights it holds.

A restarted server has its first weights again, and shows as a new connection: whatever comes over one
counts only after the server was asked which weights it holds. A question that failed is put again
until the server has answered, whatever connection is used then. While weights are pushed nobody asks
and nobody restores: both sides take the server's lock.
"""

from __future__ import annotations

import asyncio
import time
from logging import getLogger

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.checks import BadAnswer
from toolgrpo.engines.server_answers import Completion
from toolgrpo.engines.server_weights import ServerWeights
from toolgrpo.engines.vllm_http import NoAnswer, ServerControl, exchange, in_thread, new_client
from toolgrpo.errors import EngineError, FinalEngineError

COMPLETIONS = "/v1/completions"
_DOWN_FOR_S = 5.0  # how long a server that failed is avoided
_KEEPALIVE_S = 4.0  # vLLM drops idle connections after 5 s; be first
_MAY_PASS = (408, 425, 429)  # of the refusals, those that say "later"
_log = getLogger(__name__)


class Lost(Exception):
    """An attempt that failed; another may succeed."""


class CutShort(Lost):
    """The request's own time ended in the middle of an attempt, which says little of the server."""


class Silence:
    """Clock of a server that owes an answer. Times are seconds of one clock.

    Any answer ends a silence, so a busy server that answers now and then is not complained about.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._since_s: float | None = None
        self._said = 0  # lines of this silence
        self._problem: str | None = None

    def asked(self, now_s: float) -> None:
        """Note a request that was sent; its answer is owed from now on, if none was before."""
        if self._since_s is None:
            self._since_s = now_s

    def left(self, still_open: int) -> None:
        """Note a cancelled request, for which nothing is owed."""
        if not still_open and self._problem is None:
            self._since_s = None

    def failed(self, problem: str) -> None:
        """Note a failed request, whose answer is still owed."""
        self._problem = problem

    def answered(self, now_s: float, still_open: int) -> None:
        """Note a good answer; what is still open is owed from now on."""
        self._since_s = now_s if still_open else None
        self._said, self._problem = 0, None

    def due(self, now_s: float, every_s: float) -> str | None:
        """Return the line to say now, or None until another `every_s` of silence have passed."""
        if self._since_s is None or now_s - self._since_s < (self._said + 1) * every_s:
            return None
        silent_s = now_s - self._since_s
        self._said = int(silent_s / every_s)
        problem = f" ({self._problem})" if self._problem else ""
        return (
            f"the vLLM server at {self._url} has not answered for {silent_s:.0f} s{problem}; a request is given "
            f"{self._timeout_s:g} s"
        )


class ServerLink:
    """The connections of one rollout to one server. Make it on the rollout's event loop."""

    def __init__(self, server: ServerControl, weights: ServerWeights | None, vocabulary: int, timeout_s: float) -> None:
        self.url = server.url
        self.n_open = 0
        self.restores = 0
        self.silence = Silence(server.url, timeout_s)
        self._server = server
        self._weights = weights
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        name = server.base_model.name
        self._model = name if weights is None else weights.model(name)
        self._client = new_client(keepalive_s=_KEEPALIVE_S)
        self._down_until_s = 0.0
        self._check_since_s = 0.0
        self._held_at_s = -1.0
        self._asking = asyncio.Lock()

    @property
    def load(self) -> tuple[bool, int]:
        """Return what orders servers: whether it failed just now, and how many requests it has."""
        return self._down_until_s > time.monotonic(), self.n_open

    async def close(self) -> None:
        await self._client.close()

    async def sample(self, request: SampleRequest, left_s: float) -> Sample:
        """Try once, for as long as one server may take. Raises `Lost` or `BadAnswer` if another try may succeed."""
        limit_s = min(self._timeout_s, left_s)
        self.n_open += 1
        self.silence.asked(time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                sample = await self._sample(request)
        except TimeoutError:
            cut = CutShort(f"silent for {limit_s:.3g} s")
            self._note(cut)
            raise cut from None
        except (Lost, BadAnswer) as problem:
            self._note(problem)
            raise
        except asyncio.CancelledError:
            self.silence.left(self.n_open - 1)
            raise
        finally:
            self.n_open -= 1
        self.silence.answered(time.monotonic(), self.n_open)
        return sample

    def _note(self, problem: Lost | BadAnswer) -> None:
        self._down_until_s = time.monotonic() + _DOWN_FOR_S
        self.silence.failed(str(problem))
        if isinstance(problem, BadAnswer):
            _log.warning("an answer of the vLLM server at %s cannot be used: %s", self.url, problem)

    async def _sample(self, request: SampleRequest) -> Sample:
        restores_before = self.restores
        asked = Completion(request, self._model, self._vocabulary)
        try:
            answer = await exchange(
                self._client,
                "POST",
                f"{self.url}{COMPLETIONS}",
                most_bytes=asked.most_bytes,
                json=asked.payload(),
                headers={"X-Request-Id": asked.request_id},
                on_connect=self._check_again,
            )
        except NoAnswer as error:
            raise Lost(str(error)) from error
        if answer.status >= 500 or answer.status in _MAY_PASS:
            raise Lost(f"HTTP {answer.status}: {answer.excerpt}")
        if answer.status == 404:  # an adapter that it has no longer
            self._check_again()
        await self._ensure_weights()
        if self.restores != restores_before:
            raise Lost("it was restarted and has been given the trained weights again")
        if not 200 <= answer.status < 300:
            raise FinalEngineError(
                f"the vLLM server at {self.url} refused a request of {len(request.ids)} tokens with "
                f"{answer.status}: {answer.excerpt}"
            )
        return asked.sample(answer.json())

    def _check_again(self) -> None:
        """Ask the server before its next answer counts: it may be another one than before."""
        self._check_since_s = time.monotonic()

    def note_restart(self) -> None:
        """Count a server that lost its weights as restored: what it drew is thrown away.

        The caller has the server's lock, and newer weights, after which nobody would find out.
        """
        if self._weights is not None and not self._weights.holds(self._server):
            self.restores += 1

    async def _ensure_weights(self) -> None:
        """Ask the server which weights it holds, unless it was asked after the last `_check_again`.

        Raises `Lost` if it cannot be reached, and `FinalEngineError` if it cannot be given its weights again.
        """
        weights = self._weights
        if weights is None or self._held_at_s > self._check_since_s:
            return
        async with self._asking:
            if self._held_at_s > self._check_since_s:
                return
            asked_s = time.monotonic()
            try:
                if not await asyncio.wrap_future(in_thread(lambda: self._held(weights))):
                    self.restores += 1
            except FinalEngineError:
                raise
            except EngineError as error:
                raise Lost(str(error)) from error
            self._held_at_s = asked_s

    def _held(self, weights: ServerWeights) -> bool:
        """Return whether the server held the weights; if not, it does now."""
        with self._server.weight_lock:
            held = weights.holds(self._server)
            if not held:
                weights.restore(self._server)
            return held
