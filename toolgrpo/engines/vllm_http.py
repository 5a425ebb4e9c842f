"""What is said to a `vllm serve` over HTTP, and what its answers mean. Tested with vLLM 0.31.0.

Token ids go in and come out (`prompt` takes ids, `return_token_ids` gives them back), so nothing is tokenized on the way.
`ServerControl` is the blocking side: readiness, and the calls that replace weights, made while no rollout runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

import httpx

from toolgrpo.engines.base import FinishReason, Sample, SampleRequest
from toolgrpo.engines.vllm_seam import warn_if_untested
from toolgrpo.engines.vllm_worker import WORKER_EXTENSION
from toolgrpo.errors import ConfigError, EngineError

__all__ = ["COMPLETIONS", "ServerControl", "completion_payload", "parse_completion"]

COMPLETIONS = "/v1/completions"
_CONTROL_TIMEOUT_S = 600.0  # a reload of many GiB from a slow disk may take minutes
_POLL_S = 0.5
_SAY_AGAIN_S = 30.0
_log = getLogger(__name__)


def completion_payload(request: SampleRequest, model: str) -> dict[str, Any]:
    """The body of a completion request; nothing is left to the server's defaults."""
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


def parse_completion(body: Mapping[str, Any], request: SampleRequest) -> Sample:
    """The sample in an answer; `EngineError` if it was aborted, `ConfigError` if the server does not do as told."""
    choice = body["choices"][0]
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or logprobs is None:
        raise ConfigError(
            "the server's answer has no token ids or no log-probabilities; toolgrpo needs the /v1/completions of "
            "vLLM 0.31 or newer"
        )
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(f"the server ended a request with finish_reason {choice['finish_reason']!r}")
    stopped = choice["finish_reason"] == "stop"
    if stopped and ids[-1] not in request.stop_ids:
        raise ConfigError(
            f"the server stopped at token {ids[-1]}, which is none of the stop tokens {request.stop_ids}: it adds those "
            f"of the model's generation_config.json. Start it with `--generation-config vllm`."
        )
    return Sample(tuple(ids), tuple(logprobs), FinishReason.STOP if stopped else FinishReason.LENGTH)


class ServerControl:
    """One server, spoken to synchronously. Every failure is an `EngineError` or `ConfigError` that names the server."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self.url, headers=self.headers, timeout=_CONTROL_TIMEOUT_S)
        self._known_config: Any = None

    def wait_ready(self, timeout_s: float, *, may_come: Callable[[], bool] = lambda: True) -> None:
        """Wait until the server is healthy (while it still may come), saying now and then that it is waited for."""
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
                say_at = waited_s + _SAY_AGAIN_S
            time.sleep(min(_POLL_S, timeout_s))

    def _health(self) -> str | None:
        """None if the server is up, else what is wrong."""
        try:
            response = self._client.get("/health", timeout=5.0)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if response.is_success else f"HTTP {response.status_code}"

    def served_model(self) -> tuple[str, int]:
        """The name of the base model, and its honest context window."""
        cards = self.get("/v1/models")["data"]
        card = next((card for card in cards if card.get("parent") is None), None)
        if card is None or not card.get("max_model_len"):
            raise ConfigError(f"{self.url}/v1/models names no model with a max_model_len; is this a `vllm serve`?")
        return card["id"], int(card["max_model_len"])

    def warn_if_untested(self) -> None:
        """One sentence if the server is not of a tested version, where it tells its version."""
        response = self._request("GET", "/version")
        if response.is_success:
            warn_if_untested(response.json()["version"], f"runs at {self.url}")

    def check_logprobs_mode(self) -> None:
        """Refuse a server whose log-probabilities leave out temperature, top_p and the like, if it lets itself be asked."""
        mode = _find(self._config(), "logprobs_mode")
        if mode is not None and mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server at {self.url} gives {mode}, but training needs the log-probabilities of the "
                f"distribution drawn from. Start it with `--logprobs-mode processed_logprobs`."
            )

    @property
    def on_cpu(self) -> bool:
        return "cpu" in str(_find(self._config(), "worker_cls")).lower()

    @property
    def takes_nccl(self) -> bool:
        """Whether it was started with `--weight-transfer-config '{"backend": "nccl"}'`."""
        config = _find(self._config(), "weight_transfer_config")
        return isinstance(config, dict) and config.get("backend") == "nccl"

    def check_reloadable(self) -> None:
        """Refuse a server on the CPU that would keep its old output head (see `vllm_worker`)."""
        if self.on_cpu and _find(self._config(), "worker_extension_cls") != WORKER_EXTENSION:
            raise ConfigError(
                f"the vLLM server at {self.url} runs on a CPU, where vLLM reloads all weights but a tied output head. "
                f"Start it with `--worker-extension-cls {WORKER_EXTENSION}` (and toolgrpo installed beside it)."
            )

    def _config(self) -> Any:
        """The server's configuration, asked for once; empty if it is not in development mode."""
        if self._known_config is None:
            response = self._request("GET", "/server_info", params={"config_format": "json"})
            self._known_config = {} if response.status_code == 404 else _checked(response, self.url)["vllm_config"]
        return self._known_config

    def get(self, path: str) -> Any:
        return _checked(self._request("GET", path), self.url)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return _checked(self._request("POST", path, json=body), self.url)

    def close(self) -> None:
        self._client.close()

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise EngineError(
                f"the vLLM server at {self.url} did not answer {path}: {type(error).__name__}: {error}"
            ) from error


def _checked(response: httpx.Response, url: str) -> Any:
    path = response.request.url.path
    if response.status_code == 404:
        raise ConfigError(
            f"the vLLM server at {url} has no {path}. Start it with VLLM_SERVER_DEV_MODE=1 in its environment (and "
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for LoRA), on a network that only you reach."
        )
    if not response.is_success:
        raise EngineError(
            f"the vLLM server at {url} answered {path} with {response.status_code}: {response.text[:500]}"
        )
    return response.json() if "json" in response.headers.get("content-type", "") else None


def _find(tree: Any, key: str) -> Any:
    """The first value under `key`, anywhere in a JSON tree."""
    if isinstance(tree, dict):
        if key in tree:
            return tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        return next((found for branch in tree if (found := _find(branch, key)) is not None), None)
    return None
