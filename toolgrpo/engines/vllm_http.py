"""What is said to a `vllm serve` over HTTP. Tested with vLLM 0.31.0.

Token ids go in and come out (`prompt` takes ids, `return_token_ids` gives them back), so nothing is
tokenized on the way. `ServerControl` is the blocking side: readiness, and the calls that replace
weights, made while no rollout runs.

Invariants of a control call: it ends within `timeout_s`, tries and answer included; a lost
connection, a 5xx and an answer that `server_answers` does not believe are tried again a few times
where the call may be made twice; what is left is an `EngineError` (or a `ConfigError`, where the
server was started wrongly) that names the server. While it waits, one line per minute says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from toolgrpo.engines import server_answers
from toolgrpo.engines.base import SampleRequest
from toolgrpo.engines.checks import BadAnswer
from toolgrpo.engines.http_exchange import Answer, NoAnswer, decoded, exchange, in_background, new_client
from toolgrpo.engines.server_answers import ServerConfig
from toolgrpo.engines.vllm_seam import warn_if_untested
from toolgrpo.engines.vllm_worker import WORKER_EXTENSION
from toolgrpo.errors import ConfigError, EngineError

T = TypeVar("T")

COMPLETIONS = "/v1/completions"
SAY_EVERY_S = 60.0
_HEALTH_TIMEOUT_S = 5.0
_POLL_S = 0.5
_SAY_WAITING_EVERY_S = 30.0
_TRIES = 4
_FIRST_PAUSE_S = 0.25
_CONTROL_BYTES = 16 << 20
_log = getLogger(__name__)


def completion_payload(request: SampleRequest, model: str) -> dict[str, Any]:
    """Return the body of a completion request; nothing is left to the server's defaults."""
    options = request.options
    return {
        "model": model,
        "prompt": list(request.ids),
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "seed": request.seed,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,  # only `stop_ids` end a turn
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # spares the server the text of every token
        "add_special_tokens": False,
    }


def completion_bytes(request: SampleRequest) -> int:
    """Return more bytes than any honest answer has: about 120 a token, 8 for one of the prompt."""
    return (1 << 16) + 32 * len(request.ids) + 1024 * request.max_tokens


class ServerControl:
    """One server, spoken to synchronously.

    Every failure is an `EngineError` or `ConfigError` that names the server.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 900.0, say_every_s: float = SAY_EVERY_S
    ) -> None:
        self.url = _checked_url(url)
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._say_every_s = say_every_s
        self._known_config: ServerConfig | None = None
        self._config_is_known = False

    def wait_ready(self, timeout_s: float, *, may_come: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server is healthy (while it still may come),
        saying now and then that it is waited for.
        """
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

        async def ask() -> Answer:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S), new_client(self.headers) as client:
                return await exchange(client, "GET", f"{self.url}/health", most_bytes=_CONTROL_BYTES)

        try:
            answer = in_background(ask)
        except TimeoutError:
            return f"no answer within {_HEALTH_TIMEOUT_S:g} s"
        except (NoAnswer, BadAnswer) as error:
            return str(error)
        return None if 200 <= answer.status < 300 else f"HTTP {answer.status}"

    def served_model(self) -> tuple[str, int]:
        """Return the name of the base model, and its honest context window."""
        cards = self.get("/v1/models", server_answers.model_cards)
        card = next((card for card in cards if card.parent is None), None)
        if card is None or card.max_model_len is None:
            raise ConfigError(f"{self.url}/v1/models names no model with a max_model_len; is this a `vllm serve`?")
        return card.name, card.max_model_len

    def adapters(self) -> set[str]:
        """Return the names of everything that is served, adapters among them."""
        return {card.name for card in self.get("/v1/models", server_answers.model_cards)}

    def warn_if_untested(self) -> None:
        """Warn if the server tells its version and it is not a tested one."""
        version = self.get("/version", server_answers.version_of_server, or_none=True)
        if version is not None:
            warn_if_untested(version, f"runs at {self.url}")

    def check_logprobs_mode(self) -> None:
        """Refuse a server whose log-probabilities leave out temperature, top_p and the like,
        if it lets itself be asked.
        """
        config = self._config()
        if config is not None and config.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server at {self.url} gives {config.logprobs_mode}, but training needs the log-probabilities "
                f"of the distribution drawn from. Start it with `--logprobs-mode processed_logprobs`."
            )

    @property
    def on_cpu(self) -> bool:
        config = self._config()
        return config is not None and "cpu" in config.worker.lower()

    @property
    def weight_transfer(self) -> str | None:
        """The backend of `--weight-transfer-config`, if it was started with one and says so."""
        config = self._config()
        return None if config is None else config.weight_transfer

    def check_reloadable(self) -> None:
        """Refuse a server on the CPU that would keep old weights (see `vllm_worker`)."""
        config = self._config()
        if config is not None and self.on_cpu and config.worker_extension != WORKER_EXTENSION:
            raise ConfigError(
                f"the vLLM server at {self.url} runs on a CPU, where vLLM reloads all weights but a tied output head "
                f"and the experts of a mixture. "
                f"Start it with `--worker-extension-cls {WORKER_EXTENSION}` (and toolgrpo installed beside it)."
            )

    def _config(self) -> ServerConfig | None:
        """Return the server's configuration, asked for once; None outside development mode."""
        if not self._config_is_known:
            path = "/server_info?config_format=json"
            self._known_config = self.get(path, server_answers.server_config, or_none=True)
            self._config_is_known = True
        return self._known_config

    def get(self, path: str, read: Callable[[Any], T], *, or_none: bool = False) -> Any:
        """Return what `read` makes of an answer, or None if `or_none` and no such path."""
        return self._call("GET", path, None, lambda answer: read(decoded(answer.body)), _TRIES, or_none=or_none)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[Any], T] | None = None,
        *,
        once: bool = False,
    ) -> Any:
        """Return what `read` makes of the answer, if given; with `once`, never send twice."""

        def result(answer: Answer) -> Any:
            return None if read is None else read(decoded(answer.body))

        return self._call("POST", path, body, result, 1 if once else _TRIES)

    def _call(
        self, method: str, path: str, body: Any, read: Callable[[Answer], T], tries: int, *, or_none: bool = False
    ) -> T | None:
        started, pause_s = time.monotonic(), _FIRST_PAUSE_S
        cause: Exception
        name = path.partition("?")[0]
        for number in range(1, tries + 1):
            left_s = started + self._timeout_s - time.monotonic()
            try:
                answer = in_background(lambda: self._exchange(method, path, body, left_s))  # noqa: B023  # used up here
                if answer.status == 404 and or_none:
                    return None
                self._check_status(answer, name)
                return read(answer)
            except TimeoutError:
                raise EngineError(
                    f"the vLLM server at {self.url} did not answer {name} within {self._timeout_s:g} s "
                    f"(--engine_timeout). Look at its log, and resume from the last checkpoint."
                ) from None
            except NoAnswer as error:
                problem, cause = f"did not answer {name}: {error}", error
            except BadAnswer as error:
                problem, cause = f"gave an answer to {name} that cannot be used: {error}", error
            if number == tries or time.monotonic() + pause_s - started > self._timeout_s:
                raise EngineError(f"the vLLM server at {self.url} {problem}{_times(number)}") from cause
            _log.warning("the vLLM server at %s %s; it is asked again", self.url, problem)
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    async def _exchange(self, method: str, path: str, body: Any, left_s: float) -> Answer:
        """Try once, within the seconds that are left, logging one line per minute."""
        waiting = asyncio.create_task(self._say_waiting(path.partition("?")[0]))
        try:
            async with asyncio.timeout(max(0.0, left_s)), new_client(self.headers) as client:
                options = {} if body is None else {"json": body}
                return await exchange(client, method, f"{self.url}{path}", most_bytes=_CONTROL_BYTES, **options)
        finally:
            waiting.cancel()

    async def _say_waiting(self, name: str) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(self._say_every_s)
            _log.warning(
                "the vLLM server at %s has not answered %s for %.0f s; it is given %g s",
                self.url,
                name,
                time.monotonic() - started,
                self._timeout_s,
            )

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
    raise ConfigError(f"{url!r} is no address of a vLLM server ({why}); give one like http://localhost:8000")


def _times(number: int) -> str:
    return "" if number == 1 else f" ({number} times)"
