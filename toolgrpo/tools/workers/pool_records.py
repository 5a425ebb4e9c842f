"""The pool's records: a call on its way, a worker as the trainer sees it, the pool's options."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from toolgrpo.tools.base import Reply
from toolgrpo.tools.workers.connections import WorkerLink
from toolgrpo.tools.workers.tool_worker import WorkerLimits


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How many workers, and what each is given."""

    workers: int = 4
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    frozen_after_s: float = 3.0  # silence after which a worker with several calls is given up; less for short timeouts
    load_timeout_s: float = 120.0


@dataclass(slots=True, eq=False)
class Job:
    """One call on its way."""

    id: int
    message: Mapping[str, Any]
    timeout_s: float
    alone: bool
    is_async: bool
    future: Future[Reply]
    started: float = 0.0  # when it was sent
    timer: asyncio.TimerHandle | None = None
    answered: bool = False
    begun: bool = False  # code of the tool may have run
    recalled: bool = False  # its worker was asked to give it back, if it has not begun
    returns: int = 0  # how often it was sent and did not begin

    def take_back(self) -> None:
        """Make it as if it had not been sent."""
        self.started, self.begun, self.recalled = 0.0, False, False
        if self.timer is not None:
            self.timer.cancel()


class WorkerKind(StrEnum):
    """What a worker is for."""

    SHARED = "shared"  # calls of stateless tools, many at a time
    SINGLE = "single"  # one call, then the end
    RESERVED = "reserved"  # the calls of one environment instance


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process as the pool sees it."""

    number: int
    kind: WorkerKind
    born: float
    link: WorkerLink | None = None
    ready: bool = False
    retiring: bool = False  # takes no new calls, and ends when those on it have an answer
    touched: bool = False  # code of a tool has run there
    silent_s: float | None = None  # since it was pinged
    hung_up: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)  # an answered job stays until its reply or the worker's end

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.answered]

    @property
    def unbegun(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.answered and not job.begun]

    @property
    def has_overdue_coroutine(self) -> bool:
        """Tell whether a coroutine runs there that was to end: its loop may be blocked."""
        return any(job.is_async and job.answered for job in self.jobs.values())

    def patience_s(self, most_s: float) -> float:
        """Return how long it may be silent while calls wait for it: shorter for short timeouts."""
        return min(most_s, min(job.timeout_s for job in self.waiting) / 4)


def choose_worker(workers: Iterable[WorkerRecord], most_calls: int, *, needs_loop: bool) -> WorkerRecord | None:
    """Return the shared worker with the fewest calls that can take one more; None if none can."""
    free = [
        worker
        for worker in workers
        if worker.kind is WorkerKind.SHARED
        and worker.ready
        and not worker.hung_up
        and not worker.retiring
        and len(worker.jobs) < most_calls
        and not (needs_loop and worker.has_overdue_coroutine)
    ]
    return min(free, key=lambda worker: len(worker.jobs), default=None)


def describe_ending(status: int) -> str:
    """Say how a process ended, for a model to read."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process of the tool was ended by {name}"
    return f"the process of the tool ended with exit code {status}"
