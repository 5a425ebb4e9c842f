"""A server on loopback with enough of vLLM's HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolgrpo.testing.vllm_stand_in import StandInVLLM


@pytest.fixture
def server() -> Iterator[StandInVLLM]:
    with StandInVLLM() as running:
        yield running
