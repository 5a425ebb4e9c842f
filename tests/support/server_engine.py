"""The server engine over stand-ins, and the request that they are asked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.vllm_options import ServerOptions
from toolgrpo.engines.vllm_server import VLLMServerEngine
from toolgrpo.testing.vllm_stand_in import StandInVLLM

VOCABULARY = 320


def engine_of(*servers: StandInVLLM | str, vocabulary: int = VOCABULARY, **options: Any) -> VLLMServerEngine:
    """Return an engine over these servers, or their URLs; `options` are those of the engine and its `ServerOptions`."""
    urls = tuple(server if isinstance(server, str) else server.url for server in servers)
    asked = {field.name: options.pop(field.name) for field in fields(ServerOptions) if field.name in options}
    return VLLMServerEngine(ServerOptions(urls=urls, **asked), vocabulary=vocabulary, **options)


def ask(*ids: int) -> SampleRequest:
    return SampleRequest(ids=ids or (1, 2, 3), max_tokens=8, stop_ids=(9,), options=SamplingOptions())
