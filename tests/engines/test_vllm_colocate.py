"""When the colocated engine steps, on an engine that only counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engines.conftest import during_a_rollout
from toolgrpo.engines.base import FinishReason, Sample, SampleRequest, SamplingOptions
from toolgrpo.engines.vllm_colocate import VLLMColocateEngine
from toolgrpo.errors import EngineError


class CountingEngine:
    """Stands in for `StepEngine`: each step ends every open request, and is remembered by how many there were."""

    max_model_len = 100
    vocabulary = 10

    def __init__(self) -> None:
        self.open: list[str] = []
        self.steps: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request_id: str, request: SampleRequest) -> None:
        self.open.append(request_id)

    def step(self) -> list[tuple[str, Sample]]:
        ended, self.open = self.open, []
        self.steps.append(len(ended))
        return [(request_id, Sample((1,) * 5, (-0.5,) * 5, FinishReason.LENGTH)) for request_id in ended]

    def abort(self, request_ids: list[str]) -> None:
        self.open = [request_id for request_id in self.open if request_id not in request_ids]

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


REQUEST = SampleRequest((1, 2), 5, (), SamplingOptions())


def steps_of(passes: list[int], rounds: int) -> list[int]:
    """The steps taken when episodes ask after that many passes of the event loop, `rounds` times in a row."""
    vllm = CountingEngine()
    engine = VLLMColocateEngine(vllm)  # type: ignore[arg-type]

    async def episode(late: int) -> None:
        for _ in range(rounds):
            for _ in range(late):
                await asyncio.sleep(0)
            await engine.sample(REQUEST)

    async def work() -> None:
        await asyncio.gather(*(episode(late) for late in passes))

    during_a_rollout(engine, work)
    return vllm.steps


def test_after_a_pause_requests_that_come_one_after_the_other_go_into_one_step_and_one_alone_into_its_own() -> None:
    assert steps_of([0, 3, 5, 9], rounds=3) == [4, 4, 4]
    assert steps_of([0], rounds=3) == [1, 1, 1]


def test_a_stream_of_requests_without_end_does_not_hold_the_engine_back() -> None:
    vllm = CountingEngine()
    engine = VLLMColocateEngine(vllm)  # type: ignore[arg-type]

    async def work() -> None:
        tasks: list[asyncio.Task[Any]] = []
        while not vllm.steps:
            assert len(tasks) < 1_000_000
            tasks.append(asyncio.create_task(engine.sample(REQUEST)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    during_a_rollout(engine, work)
    assert sum(vllm.steps) >= vllm.steps[0] > 1


def test_a_sample_that_cannot_be_trained_on_is_an_error_of_its_request_alone() -> None:
    vllm = CountingEngine()
    vllm.vocabulary = 1  # so that token 1 is beyond it
    engine = VLLMColocateEngine(vllm)  # type: ignore[arg-type]

    async def work() -> None:
        with pytest.raises(EngineError, match=r"token_ids\[0\].*1.*0.*0"):
            await engine.sample(REQUEST)
        vllm.vocabulary = 10
        await engine.sample(REQUEST)

    during_a_rollout(engine, work)
