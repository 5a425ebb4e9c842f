"""The colocated engine, with a note of what each of its steps held and cost (for `_schedule.py`)."""

from __future__ import annotations

import time

from toolgrpo.engines.base import Sample, SampleRequest
from toolgrpo.engines.vllm_seam import StepEngine


class CountedSteps(StepEngine):
    """Notes (rollouts in it, of these joined, seconds) of each step. Not covered: requests that are aborted."""

    def __init__(self, engine: object) -> None:
        super().__init__(engine)
        self.log: list[tuple[int, int, float]] = []
        self._open = self._joined = 0

    def add(self, request_id: str, request: SampleRequest) -> str:
        self._open += 1
        self._joined += 1
        return super().add(request_id, request)

    def step(self) -> list[tuple[str, Sample]]:
        rollouts, joined, started = self._open, self._joined, time.perf_counter()
        finished = super().step()
        self.log.append((rollouts, joined, time.perf_counter() - started))
        self._open, self._joined = rollouts - len(finished), 0
        return finished
