"""The pool's records: a call on its way, and a worker as the trainer sees it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from toolgrpo.errors import ToolExecutorError
from toolgrpo.tools.base import Reply
from toolgrpo.tools.workers.connections import WorkerLink

_FROZEN_AFTER_S = 3.0


@dataclass(slots=True, eq=False)
class Job:
    """One call on its way."""

    id: int
    message: Mapping[str, Any]
    timeout_s: float
    alone: bool
    is_async: bool
    future: Future[Reply]
    started: float = field(default=0.0, init=False)  # when it was sent
    timer: asyncio.TimerHandle | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    begun: bool = field(default=False, init=False)  # code of the tool may have run
    recalled: bool = field(default=False, init=False)  # its worker was asked to give it back, if it has not begun
    returns: int = field(default=0, init=False)  # how often it was sent and did not begin

    def answer(self, reply: Reply) -> None:
        if self.answered:
            return
        self.answered = True
        if self.timer is not None:
            self.timer.cancel()
        # its caller may have given up: an episode's deadline cancels the future
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(reply.timed(self.started, time.monotonic()))

    def refuse(self, error: ToolExecutorError) -> None:
        self.answered = True
        if not self.future.done():
            self.future.set_exception(error)

    def take_back(self) -> None:
        """Make it as if it had not been sent."""
        self.started, self.begun, self.recalled = 0.0, False, False
        if self.timer is not None:
            self.timer.cancel()


class WorkerKind(StrEnum):
    """The calls that a worker takes."""

    SHARED = "shared"  # calls of stateless tools, many at a time
    SINGLE = "single"  # one call, then the end
    RESERVED = "reserved"  # the calls of one environment instance


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process as the pool sees it."""

    number: int
    kind: WorkerKind
    born: float
    link: WorkerLink | None = field(default=None, init=False)
    ready: bool = field(default=False, init=False)
    retiring: bool = False  # takes no new calls, and ends when those on it have an answer
    touched: bool = field(default=False, init=False)  # code of a tool has run there
    silent_s: float | None = field(default=None, init=False)  # since it was pinged
    hung_up: bool = field(default=False, init=False)
    # an answered job stays until its reply or the worker's end
    jobs: dict[int, Job] = field(default_factory=dict, init=False)

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.answered]

    @property
    def unbegun(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.answered and not job.begun]

    def takes_one_more(self, most_calls: int, *, needs_loop: bool) -> bool:
        """Return whether it can be given a call of a stateless tool, a coroutine if that needs a loop."""
        # answered calls count too: one that overran its deadline still holds a thread there
        is_free = self.ready and not self.hung_up and not self.retiring and len(self.jobs) < most_calls
        # where a coroutine runs that was to end, the loop may be blocked
        overdue = needs_loop and any(job.is_async and job.answered for job in self.jobs.values())
        return self.kind is WorkerKind.SHARED and is_free and not overdue

    def recall(self) -> None:
        """Ask for the calls back that have not begun there."""
        jobs = [job for job in self.unbegun if not job.recalled]
        if jobs and self.link is not None and self.kind is WorkerKind.SHARED:
            for job in jobs:
                job.recalled = True
            self.link.send({"op": "withdraw", "ids": [job.id for job in jobs]})

    def anew(self) -> WorkerRecord:
        """Return the record of a worker in its place, with the calls that wait: none has begun."""
        again = WorkerRecord(self.number, self.kind, born=time.monotonic())
        for job in self.waiting:
            job.take_back()
            again.jobs[job.id] = job
        return again

    @property
    def patience_s(self) -> float:
        """Return how long it may be silent while calls wait for it: shorter for short timeouts."""
        return min(_FROZEN_AFTER_S, min(job.timeout_s for job in self.waiting) / 4)


def describe_ending(status: int) -> str:
    """Say how a process ended, for a model to read."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process of the tool was ended by {name}"
    return f"the process of the tool ended with exit code {status}"
