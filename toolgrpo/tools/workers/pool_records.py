"""The pool's records: a call on its way, a worker as the trainer sees it, and what the pool is given."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from toolgrpo.tools.tool_reply import Reply
from toolgrpo.tools.workers.connections import WorkerLink
from toolgrpo.tools.workers.tool_worker import Limits

__all__ = ["Job", "PoolOptions", "WorkerRecord", "describe_ending"]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How many workers, and what each is given."""

    workers: int = 4
    limits: Limits = field(default_factory=Limits)
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
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None
    answered: bool = False


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process as the pool sees it."""

    number: int
    alone: bool  # for one job, or for one environment instance
    born: float
    link: WorkerLink | None = None
    ready: bool = False
    retiring: bool = False
    silent_s: float | None = None  # since it was pinged
    hung_up: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)  # an answered job stays until its reply or the worker's end

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.answered]


def describe_ending(status: int) -> str:
    """How a process ended, for a model to read."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process of the tool was ended by {name}"
    return f"the process of the tool ended with exit code {status}"
