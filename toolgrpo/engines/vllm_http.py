"""HTTP with a `vllm serve`: one exchange, bounded in bytes and time, and the blocking control calls.

Tested with vLLM 0.32.0. Token ids go in and come out, so nothing is tokenized on the way.

An exchange reads an answer up to a number of bytes and does not decompress it (none is asked for,
and a compressed one is refused); it follows no redirect. A lost connection is a `NoAnswer`, a bad
answer a `BadAnswer`. The caller's `asyncio.timeout` around `exchange` bounds headers and body
together, however slowly they drip. Hundreds of requests are in flight on the training's cores: hence
aiohttp, and not a pool that looks through all its connections at every request
(`benchmarks/server_client.py`).

`ServerControl` asks for readiness and replaces weights. A call ends within `timeout_s`, tries and
answer included. A lost connection, a 5xx and an answer that is not believed are tried again a few
times where the call may be made twice; after that comes an `EngineError` (or a `ConfigError`, where
the server was started wrongly) that names the server. One line per minute says that it waits.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from logging import getLogger
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import aiohttp

from toolgrpo.engines import server_answers
from toolgrpo.engines.checks import BadAnswer, Described, shown
from toolgrpo.engines.server_answers import ServedModel, ServerConfig
from toolgrpo.engines.vllm_seam import warn_if_untested
from toolgrpo.engines.vllm_worker import WORKER_EXTENSION
from toolgrpo.errors import ConfigError, EngineError

T = TypeVar("T")

SAY_EVERY_S = 60.0
_CONNECT_S = 10.0
_HEALTH_TIMEOUT_S = 5.0
_POLL_S = 0.5
_SAY_WAITING_EVERY_S = 30.0
_TRIES = 4
_FIRST_PAUSE_S = 0.25
_CONTROL_BYTES = 16 << 20
_log = getLogger(__name__)


class NoAnswer(Exception):
    """A connection that failed, or was lost before the whole answer had come."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a body of at most as many bytes as the caller allowed."""

    status: int
    body: bytes

    @property
    def excerpt(self) -> str:
        """Return its first characters, fit for a sentence."""
        return repr(self.body[:500].decode(errors="replace"))

    def json(self) -> Any:
        """Return what the body says; `BadAnswer` if it is not JSON, too deep, or too big."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:  # broken UTF-8 and JSON are ValueErrors
            what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            text = self.body[:120].decode(errors="replace") + ("..." if len(self.body) > 120 else "")
            raise BadAnswer("its body", text, f"JSON ({what})") from error


def new_client(*, keepalive_s: float = 0.0) -> aiohttp.ClientSession:
    """Return a client for many requests at once, without proxies and cookies.

    Only connecting has a deadline here. With `keepalive_s` a connection waits so long for its next request.
    """
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_end.append(_connected)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not keepalive_s, keepalive_timeout=keepalive_s or None),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[tracing],
    )


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
    context.trace_request_ctx()


async def exchange(
    client: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    most_bytes: int,
    on_connect: Callable[[], None] = lambda: None,
    **options: Any,
) -> Answer:
    """Send one request and read its answer; `NoAnswer` if none comes, `BadAnswer` if it is bad.

    `on_connect` is called if a new connection is made for it, before anything is sent.
    """
    try:
        async with client.request(
            method, url, allow_redirects=False, trace_request_ctx=on_connect, **options
        ) as response:
            if 300 <= response.status < 400:
                to = shown(response.headers.get("location"))
                raise BadAnswer("its status", Described(f"{response.status}, a redirect to {to}"), "its own answer")
            return Answer(response.status, await _bounded_body(response, most_bytes))
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(f"{type(error).__name__}: {_why(error)}".removesuffix(": ")) from error


def _why(error: Exception) -> str:
    """Return what happened, in one line."""
    if isinstance(error, aiohttp.ServerDisconnectedError):  # it has what was parsed so far as its message
        return "the connection was closed before the whole answer arrived"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    what = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return " ".join(what.split()).removesuffix(" ^")


async def _bounded_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise BadAnswer("its content-encoding", encoding, "none, since none was asked for")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            raise BadAnswer("its body", Described(f"longer than {most_bytes:,} bytes"), "no more than that")
    return bytes(body)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Start what blocks in a daemon thread, which nobody has to wait for.

    (Python waits for the threads of `asyncio.to_thread` before it ends.)
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def target() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # carried over to the caller, which raises it
            outcome.set_exception(error)

    threading.Thread(target=target, name="toolgrpo-http", daemon=True).start()
    return outcome


class ServerControl:
    """One server, for callers that block, also where an event loop runs already (a notebook).

    Every failure is an `EngineError` or `ConfigError` that names the server.
    """

    def __init__(self, url: str, *, timeout_s: float = 900.0, say_every_s: float = SAY_EVERY_S) -> None:
        self.url = _checked_url(url)
        self.weight_lock = threading.Lock()  # held by whoever gives it weights, or asks which it has
        self._timeout_s = timeout_s
        self._say_every_s = say_every_s

    def wait_ready(self, timeout_s: float, *, may_come: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server is healthy (while it still may come), with a line now and then."""
        started, say_at = time.monotonic(), 0.0
        while (failure := self._health()) is not None:
            waited_s = time.monotonic() - started
            if waited_s >= timeout_s or not may_come():
                raise EngineError(
                    f"no vLLM server is ready at {self.url} after {waited_s:.0f} s ({failure}). Start one there: "
                    f"`VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
                    f"--generation-config vllm`, or correct --vllm_server_urls."
                )
            if waited_s >= say_at:
                _log.warning("waiting for the vLLM server at %s (%s); %.0f s so far", self.url, failure, waited_s)
                say_at = waited_s + _SAY_WAITING_EVERY_S
            time.sleep(min(_POLL_S, timeout_s))

    def _health(self) -> str | None:
        """Return None if the server is up, else what is wrong."""
        try:
            answer = self._exchange("GET", "/health", None, _HEALTH_TIMEOUT_S)
        except TimeoutError:
            return f"no answer within {_HEALTH_TIMEOUT_S:g} s"
        except (NoAnswer, BadAnswer) as error:
            return str(error)
        return None if 200 <= answer.status < 300 else f"HTTP {answer.status}"

    @cached_property
    def base_model(self) -> ServedModel:
        """The base model, with its honest context window."""
        cards = self.get("/v1/models", server_answers.model_cards)
        card: ServedModel | None = next((card for card in cards if card.parent is None), None)
        if card is None or card.max_model_len is None:
            raise ConfigError(f"{self.url}/v1/models names no model with a max_model_len; is this a `vllm serve`?")
        return card

    def adapters(self) -> set[str]:
        """Return the names of everything that is served, adapters among them."""
        return {card.name for card in self.get("/v1/models", server_answers.model_cards)}

    def warn_if_untested(self) -> None:
        """Warn if the server tells its version and it is not a tested one."""
        version = self.get("/version", server_answers.version_of_server, or_none=True)
        warn_if_untested(version, f"runs at {self.url}")

    def check_logprobs_mode(self) -> None:
        """Refuse a server whose log-probabilities leave out temperature, top_p and the like, if it can be asked."""
        config = self._config
        if config is not None and config.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server at {self.url} gives {config.logprobs_mode}, but training needs the "
                f"log-probabilities of the sampled distribution. Start it with `--logprobs-mode processed_logprobs`."
            )

    @property
    def on_cpu(self) -> bool:
        return self._config is not None and "cpu" in self._config.worker.lower()

    @property
    def weight_transfer(self) -> str | None:
        """The backend of `--weight-transfer-config`, if it was started with one and says so."""
        return None if self._config is None else self._config.weight_transfer

    def check_reloadable(self) -> None:
        """Refuse a server on the CPU that would keep old weights (see `vllm_worker`)."""
        if self.on_cpu and self._config is not None and self._config.worker_extension != WORKER_EXTENSION:
            raise ConfigError(
                f"the vLLM server at {self.url} runs on a CPU, where vLLM reloads all weights but a tied output head "
                f"and the experts of a mixture. "
                f"Start it with `--worker-extension-cls {WORKER_EXTENSION}` (and toolgrpo installed beside it)."
            )

    @cached_property
    def _config(self) -> ServerConfig | None:
        """The server's configuration; None outside development mode."""
        found: ServerConfig | None = self.get(
            "/server_info?config_format=json", server_answers.server_config, or_none=True
        )
        return found

    def get(self, path: str, read: Callable[[Any], T], *, or_none: bool = False) -> Any:
        """Return what `read` makes of an answer, or None if `or_none` and no such path."""
        return self._call("GET", path, None, read, _TRIES, or_none=or_none)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[Any], T] | None = None,
        *,
        once: bool = False,
    ) -> Any:
        """Return what `read` makes of the answer, if given; with `once`, never send twice."""
        return self._call("POST", path, body, read, 1 if once else _TRIES)

    def _call(
        self,
        method: str,
        path: str,
        body: Any,
        read: Callable[[Any], T] | None,
        tries: int,
        *,
        or_none: bool = False,
    ) -> T | None:
        started, pause_s = time.monotonic(), _FIRST_PAUSE_S
        name = path.partition("?")[0]
        for number in range(1, tries + 1):
            try:
                answer = self._exchange(method, path, body, started + self._timeout_s - time.monotonic())
                if answer.status == 404 and or_none:
                    return None
                self._check_status(answer, name)
                return None if read is None else read(answer.json())
            except TimeoutError:
                raise EngineError(
                    f"the vLLM server at {self.url} did not answer {name} within {self._timeout_s:g} s "
                    f"(--engine_timeout). Look at its log, and resume from the last checkpoint."
                ) from None
            except (NoAnswer, BadAnswer) as error:
                bad = f"gave an answer to {name} that cannot be used: {error}"
                problem = bad if isinstance(error, BadAnswer) else f"did not answer {name}: {error}"
                if number == tries or time.monotonic() + pause_s - started > self._timeout_s:
                    times = "" if number == 1 else f" ({number} times)"
                    raise EngineError(f"the vLLM server at {self.url} {problem}{times}") from error
            _log.warning("the vLLM server at %s %s; it is asked again", self.url, problem)
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    def _exchange(self, method: str, path: str, body: Any, left_s: float) -> Answer:
        """Try once, within the seconds that are left, with a line per minute."""

        async def ask() -> Answer:
            waiting = asyncio.create_task(self._say_waiting(path.partition("?")[0]))
            try:
                async with asyncio.timeout(max(0.0, left_s)), new_client() as client:
                    options = {} if body is None else {"json": body}
                    return await exchange(client, method, f"{self.url}{path}", most_bytes=_CONTROL_BYTES, **options)
            finally:
                waiting.cancel()

        return in_thread(lambda: asyncio.run(ask())).result()

    async def _say_waiting(self, name: str) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(self._say_every_s)
            waited_s = time.monotonic() - started
            line = "the vLLM server at %s has not answered %s for %.0f s; it is given %g s"
            _log.warning(line, self.url, name, waited_s, self._timeout_s)

    def _check_status(self, answer: Answer, name: str) -> None:
        if answer.status == 404:
            raise ConfigError(
                f"the vLLM server at {self.url} has no {name}. Start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                f"(and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for LoRA), on a network that only you reach."
            )
        if answer.status >= 500:
            raise NoAnswer(f"HTTP {answer.status}: {answer.excerpt}")  # such as may pass
        if not 200 <= answer.status < 300:
            raise EngineError(f"the vLLM server at {self.url} refused {name} with {answer.status}: {answer.excerpt}")


def _checked_url(url: str) -> str:
    """Return the address without `/v1` and slashes at its end."""
    try:
        parsed = urlsplit(url)
        has_host = bool(parsed.hostname) and parsed.port != 0 and not any(map(str.isspace, url))
    except ValueError as error:
        _refuse_url(url, str(error))
    if parsed.scheme not in ("http", "https") or not has_host:
        _refuse_url(url, "it needs http:// or https:// and a host")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _refuse_url(url: str, why: str) -> NoReturn:
    raise ConfigError(f"{url!r} is not an address of a vLLM server ({why}); give one like http://localhost:8000")
