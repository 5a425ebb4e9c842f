"""JSON to and from a vLLM server: the body of a completion, and which answers are believed. Tested with vLLM 0.32.0.

Pure functions. What does not fit raises `BadAnswer`, which names the field, its value and what was
expected. Every field has one place, which the sentence names; nothing is searched for.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.engines.base import FinishReason, Sample, SampleRequest
from toolgrpo.engines.checks import MISSING, BadAnswer, Described, checked_sample, shown

_KINDS = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}
_HINT = "; toolgrpo needs the /v1/completions of vLLM 0.31 or newer"


@dataclass(frozen=True, slots=True)
class Completion:
    """One request to `/v1/completions`, and what its answer must be the answer to."""

    request: SampleRequest
    model: str
    vocabulary: int
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # vLLM returns it behind `cmpl-`

    def payload(self) -> dict[str, Any]:
        """Return the body; nothing is left to the server's defaults."""
        options = self.request.options
        return {
            "model": self.model,
            "prompt": list(self.request.ids),
            "max_tokens": self.request.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
            "seed": self.request.seed,
            "stop_token_ids": list(self.request.stop_ids),
            "ignore_eos": True,  # only `stop_ids` end a turn
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # spares the server the text of every token
            "add_special_tokens": False,
        }

    @property
    def most_bytes(self) -> int:
        """More than any honest answer has: about 120 a token, 8 for one of the prompt."""
        return (1 << 16) + 32 * len(self.request.ids) + 1024 * self.request.max_tokens

    def sample(self, body: Any) -> Sample:
        """Return the sample in an answer."""
        _same(body, "id", f"cmpl-{self.request_id}", "that of this request")
        _same(body, "model", self.model, "the model asked for")
        choices = _field(body, "choices", list)
        if len(choices) != 1:
            raise BadAnswer("choices", Described(f"a list of {len(choices)}"), "one choice, as asked for")
        choice = choices[0]
        _same(choice, "prompt_token_ids", list(self.request.ids), "those sent", "choices[0].")
        reason = _field(choice, "finish_reason", str, "choices[0].")
        if reason not in ("stop", "length"):
            raise BadAnswer("choices[0].finish_reason", reason, "'stop' or 'length'")
        ids = _field(choice, "token_ids", list, "choices[0].", _HINT)
        logprobs = _field(choice, "logprobs", dict, "choices[0].", _HINT)
        numbers = _field(logprobs, "token_logprobs", list, "choices[0].logprobs.", _HINT)
        return checked_sample(ids, numbers, FinishReason(reason), self.request, self.vocabulary)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of `/v1/models`; an adapter has a parent and, here, no length."""

    name: str
    parent: str | None
    max_model_len: int | None


def model_cards(body: Any) -> tuple[ServedModel, ...]:
    """Return what `/v1/models` lists."""
    return tuple(_model_card(card, f"data[{n}].") for n, card in enumerate(_field(body, "data", list)))


def _model_card(card: Any, where: str) -> ServedModel:
    parent, length = _optional(card, "parent", str, where), _optional(card, "max_model_len", int, where)
    if length is not None and length < 1:
        raise BadAnswer(f"{where}max_model_len", length, "a positive number of tokens")
    return ServedModel(_field(card, "id", str, where), parent, length)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The part of `/server_info?config_format=json` (development mode) that matters here."""

    logprobs_mode: str
    worker: str
    worker_extension: str
    weight_transfer: str | None  # the backend it was started for


def server_config(body: Any) -> ServerConfig:
    """Return what `/server_info` says."""
    config = _field(body, "vllm_config", dict)
    model = _field(config, "model_config", dict, "vllm_config.")
    parallel = _field(config, "parallel_config", dict, "vllm_config.")
    transfer = _optional(config, "weight_transfer_config", dict, "vllm_config.")
    return ServerConfig(
        logprobs_mode=_field(model, "logprobs_mode", str, "vllm_config.model_config."),
        worker=_field(parallel, "worker_cls", str, "vllm_config.parallel_config."),
        worker_extension=_field(parallel, "worker_extension_cls", str, "vllm_config.parallel_config."),
        weight_transfer=None
        if transfer is None
        else _field(transfer, "backend", str, "vllm_config.weight_transfer_config."),
    )


def named_version(version: str, body: Any) -> None:
    """Check that `/update_weight_version` took the name it was given."""
    if _field(body, "success", bool) is not True:
        raise BadAnswer("success", body["success"], "true")
    _same(body, "new_version", version, "the version sent")


def status_is(status: str, body: Any) -> None:
    """Check what `/pause` and `/resume` say."""
    _same(body, "status", status, "what it was asked for")


def world_size(body: Any) -> int:
    """Return what `/get_world_size` says."""
    size: int = _field(body, "world_size", int)
    if size < 1:
        raise BadAnswer("world_size", size, "a positive number of workers")
    return size


def accepted(body: Any) -> None:
    """Check what `/collective_rpc` says: null from each worker, at least one."""
    results = _field(body, "results", list)
    if not results:
        raise BadAnswer("results", results, "one of each worker")
    for place, result in enumerate(results):
        if result is not None:
            raise BadAnswer(f"results[{place}]", result, "null, as every worker gives that did it")


def _field(holder: Any, name: str, kind: type, where: str = "", hint: str = "") -> Any:
    """Return the value under `name`, if it is of this kind (`True` is no whole number)."""
    if type(holder) is not dict:
        raise BadAnswer(where.rstrip(".") or "its body", holder, "an object")
    value = holder.get(name, MISSING)
    if type(value) is not kind:
        raise BadAnswer(f"{where}{name}", value, _KINDS[kind] + hint)
    return value


def _optional(holder: Any, name: str, kind: type, where: str) -> Any:
    if type(holder) is dict and holder.get(name) is None:
        return None
    return _field(holder, name, kind, where)


def _same(holder: Any, name: str, expected: Any, which: str, where: str = "") -> None:
    value = _field(holder, name, type(expected), where)
    if value != expected:
        raise BadAnswer(f"{where}{name}", value, f"{shown(expected)}, {which}")


def _reads(name: str, kind: type) -> Callable[[Any], Any]:
    return lambda body: _field(body, name, kind)


version_of_server = _reads("version", str)  # of `/version`
version_of_weights = _reads("weight_version", str)  # of `/weight_info`
cache_was_emptied = _reads("success", bool)  # of `/reset_prefix_cache`
phase_was_done = _reads("message", str)  # of each phase of a weight transfer: a message, and nothing else
