"""The server engine over stand-ins, and the request that they are asked."""

from __future__ import annotations

from typing import Any

from toolgrpo.engines.base import SampleRequest, SamplingOptions
from toolgrpo.engines.vllm_server import VLLMServerEngine
from toolgrpo.testing.vllm_stand_in import StandInVLLM

VOCABULARY = 320


def engine_of(*servers: StandInVLLM, **options: Any) -> VLLMServerEngine:
    return VLLMServerEngine([server.url for server in servers], **{"vocabulary": VOCABULARY, **options})


def ask(*ids: int) -> SampleRequest:
    return SampleRequest(ids=ids or (1, 2, 3), max_tokens=8, stop_ids=(9,), options=SamplingOptions())
