"""The trainer's side of the tool workers: who runs which call, until when, and what happens when a worker is lost.

Invariants:

* Every job's future gets exactly one reply: the tool's, TIMEOUT at its deadline, DIED, or `ToolExecutorError`.
* A call that overruns is answered at its deadline; its worker takes no new calls, is replaced at once, and is killed when
  the calls of others on it are done. A coroutine is cancelled first, and its worker stays if that works.
* A worker that dies, or stops answering (a tool that holds the interpreter lock), with one call on it costs that call. With
  several, nobody knows which call did it: each runs once more, alone in a process of its own, with a deadline of its own.
  So a call may run twice, only for the fault of a fellow call; `isolate=True` calls and environment methods never do.
* All state belongs to one event loop on a thread of its own (`LoopThread`); any thread or loop may submit and wait.

Why none of the existing pools (pebble, loky, anyio) is used stands in `supervisor.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from toolgrpo.errors import ToolExecutorError
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.loaded_plugin import PluginSpec
from toolgrpo.tools.tool_reply import Reply
from toolgrpo.tools.workers.connections import SupervisorLink, WorkerLink
from toolgrpo.tools.workers.output_log import OutputLog
from toolgrpo.tools.workers.pool_records import Job, PoolOptions, WorkerRecord, describe_ending
from toolgrpo.trajectory import ToolErrorKind

__all__ = ["WorkerPool"]

_logger = logging.getLogger(__name__)
_TICK_S = 0.1
_EXIT_STATUS_S = 1.0  # how long the exit status may come after the end of the connection
_CANCEL_GRACE_S = 0.5
_START_TIMEOUT_S = 60.0
_MAX_START_FAILURES = 5
_CLOSE_TIMEOUT_S = 60.0


class WorkerPool:
    """Runs jobs in worker processes under one supervisor."""

    def __init__(self, hello: Mapping[str, Any], options: PoolOptions, log: OutputLog) -> None:
        self._hello = {**hello, "limits": asdict(options.limits), "folder": os.getcwd()}
        self._pid = os.getpid()
        self._options = options
        self._log = log
        self._numbers = itertools.count(1)
        self._job_ids = itertools.count(1)
        self._workers: dict[int, WorkerRecord] = {}
        self._queue: deque[Job] = deque()
        self._start_failures = 0
        self._broken: ToolExecutorError | None = None
        self._closing = False
        self._supervisor: SupervisorLink | None = None
        self._thread = LoopThread("toolgrpo-tools")
        self._loop = self._thread.loop
        try:
            self.spec: PluginSpec = self._thread.submit(self._open()).result()
        except BaseException:
            self.close()
            raise

    # --- for any thread -------------------------------------------------------------------------------------------

    def submit(self, message: Mapping[str, Any], timeout_s: float, *, alone: bool, is_async: bool) -> Future[Reply]:
        """Run a call of a stateless tool on some worker."""
        job = self._job(message, timeout_s, alone=alone, is_async=is_async)
        self._loop.call_soon_threadsafe(self._enqueue, job)
        return job.future

    def reserve(self) -> int:
        """A worker of its own for an environment; calls go there with `submit_on`, `release` ends it."""
        number = next(self._numbers)
        self._loop.call_soon_threadsafe(self._spawn, number, True)
        return number

    def submit_on(self, number: int, message: Mapping[str, Any], timeout_s: float) -> Future[Reply]:
        """Run a call on a reserved worker; DIED if that worker is gone."""
        job = self._job(message, timeout_s, alone=True, is_async=False)
        self._loop.call_soon_threadsafe(self._send_reserved, number, job)
        return job.future

    def release(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._release, number)

    def close(self) -> None:
        """Kill every worker. Safe to call twice."""
        if not self._closing:
            self._closing = True
            self._thread.submit(self._shut_down()).result(timeout=_CLOSE_TIMEOUT_S)
            self._thread.close()

    def _job(self, message: Mapping[str, Any], timeout_s: float, *, alone: bool, is_async: bool) -> Job:
        if self._closing:
            raise ToolExecutorError("this toolbox is closed; load it again to call its tools")
        if self._broken is not None:
            raise self._broken
        if os.getpid() != self._pid:
            raise ToolExecutorError(
                "this toolbox was loaded by another process, and a fork of it cannot call its tools; load them here"
            )
        job_id = next(self._job_ids)
        return Job(job_id, {**message, "id": job_id}, timeout_s, alone, is_async, Future())

    # --- on the loop: life of the supervisor ------------------------------------------------------------------------

    async def _open(self) -> PluginSpec:
        spec = await self._start_supervisor()
        self._loop.create_task(self._tick())
        return spec

    async def _start_supervisor(self) -> PluginSpec:
        self._supervisor = SupervisorLink(self._hello, self._log)
        spec = await self._supervisor.start(
            self._options.load_timeout_s, on_exited=self._on_exited, on_lost=self._on_supervisor_lost
        )
        if spec.functions:
            self._refill()
        return spec

    def _on_supervisor_lost(self) -> None:
        if self._closing:
            return
        _logger.warning("the supervisor of the tool workers is gone; starting another")
        for worker in list(self._workers.values()):
            self._lose(worker, "the process of the tools went away")
        self._start_failures += 1
        if self._start_failures >= _MAX_START_FAILURES:
            self._break("the supervisor of the tool workers went away again and again")
            return
        self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self._start_supervisor()
        except Exception as error:
            self._break(f"the tool workers could not be started again: {error}")

    async def _shut_down(self) -> None:
        for job in [*self._queue, *(job for worker in self._workers.values() for job in worker.jobs.values())]:
            self._answer(job, Reply("the tools were shut down", ToolErrorKind.DIED))
        for worker in self._workers.values():
            if worker.link is not None:
                worker.link.close()
        self._workers.clear()
        if self._supervisor is not None:
            await self._supervisor.stop()
        self._log.close()

    def _break(self, reason: str) -> None:
        self._broken = ToolExecutorError(
            f"{reason}. The last that was printed there:\n{self._log.tail.decode('utf-8', 'replace')}"
        )
        _logger.error("%s", self._broken)
        while self._queue:
            job = self._queue.popleft()
            if not job.future.done():
                job.future.set_exception(self._broken)

    # --- on the loop: life of a worker ------------------------------------------------------------------------------

    def _refill(self) -> None:
        """As many shared workers as asked for."""
        shared = sum(1 for worker in self._workers.values() if not worker.alone and not worker.retiring)
        for _ in range(self._options.workers - shared):
            self._spawn(next(self._numbers), False)

    def _spawn(self, number: int, alone: bool) -> None:
        worker = WorkerRecord(number, alone, born=time.monotonic())
        self._workers[number] = worker
        self._loop.create_task(self._connect(worker))

    async def _connect(self, worker: WorkerRecord) -> None:
        ours, theirs = socket.socketpair()
        assert self._supervisor is not None
        self._supervisor.spawn(worker.number, theirs)
        link = WorkerLink(lambda message: self._on_message(worker, message), lambda: self._on_hung_up(worker))
        await self._loop.create_connection(lambda: link, sock=ours)
        if self._workers.get(worker.number) is not worker:  # given up meanwhile
            link.close()
            return
        worker.link = link
        for job in worker.waiting:  # of an environment: sent before the worker was there
            self._send(worker, job)

    def _on_message(self, worker: WorkerRecord, message: dict[str, Any]) -> None:
        worker.silent_s = None
        if message.get("op") == "ready":
            worker.ready = True
            self._start_failures = 0
        elif "id" in message:
            job = worker.jobs.pop(message["id"], None)
            if job is not None:
                self._answer(job, Reply.from_message(message))
            if message.get("retire") and not worker.alone:  # an instance has no fellow calls that might have seen it
                self._retire(worker)
        self._bury_if_done(worker)
        self._dispatch()

    def _on_exited(self, number: int, status: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            self._lose(worker, describe_ending(status))

    def _on_hung_up(self, worker: WorkerRecord) -> None:
        """The socket ended: no new calls go there. The exit status usually follows and says more."""
        if self._workers.get(worker.number) is worker:
            worker.hung_up = True
            self._loop.call_later(_EXIT_STATUS_S, self._lose, worker, "the process of the tool closed its connection")

    def _lose(self, worker: WorkerRecord, how: str) -> None:
        """A worker is gone, or given up: decide about its calls, and replace it."""
        if self._workers.pop(worker.number, None) is None:
            return
        self._kill(worker)
        if not worker.ready and not worker.retiring and not self._closing:
            self._start_failures += 1
            if self._start_failures >= _MAX_START_FAILURES:
                self._break("tool workers end before they can take a call")
        suspects = worker.waiting
        if worker.alone or len(worker.jobs) == 1:
            for job in suspects:
                self._answer(job, Reply(how, ToolErrorKind.DIED))
        else:
            if suspects:
                _logger.info("a tool worker was lost (%s); %d calls on it run again, each alone", how, len(suspects))
            for job in reversed(suspects):
                job.alone = True
                if job.timer is not None:
                    job.timer.cancel()
                self._queue.appendleft(job)
        if not self._closing and self._broken is None and not worker.alone:
            self._refill()
        self._dispatch()

    def _retire(self, worker: WorkerRecord) -> None:
        """No new calls; a replacement now; the end when its last caller has an answer."""
        if not worker.retiring:
            worker.retiring = True
            if not worker.alone:
                self._refill()

    def _bury_if_done(self, worker: WorkerRecord) -> None:
        if worker.retiring and not worker.waiting and self._workers.pop(worker.number, None) is not None:
            self._kill(worker)

    def _kill(self, worker: WorkerRecord) -> None:
        if worker.link is not None:
            worker.link.close()
        if self._supervisor is not None:
            self._supervisor.kill(worker.number)

    def _release(self, number: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.retiring = True
            for job in worker.waiting:
                self._answer(job, Reply("the episode ended", ToolErrorKind.DIED))
            self._bury_if_done(worker)

    # --- on the loop: life of a job ----------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        self._queue.append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting jobs to workers that have room; the least loaded first."""
        held_back: list[Job] = []
        while self._queue:
            job = self._queue.popleft()
            worker = self._worker_for(job)
            if worker is None:
                held_back.append(job)
                if not job.alone:
                    break
                continue
            worker.jobs[job.id] = job
            if worker.link is not None:
                self._send(worker, job)
        self._queue.extendleft(reversed(held_back))

    def _worker_for(self, job: Job) -> WorkerRecord | None:
        if job.alone:
            busy = sum(1 for worker in self._workers.values() if worker.alone and worker.retiring)  # not the reserved
            if busy >= self._options.limits.threads:
                return None
            number = next(self._numbers)
            self._spawn(number, True)
            self._workers[number].retiring = True  # one job, then the end
            return self._workers[number]
        free = [
            worker
            for worker in self._workers.values()
            if worker.ready
            and not worker.hung_up
            and not worker.alone
            and not worker.retiring
            and len(worker.jobs) < self._options.limits.threads
        ]
        return min(free, key=lambda worker: len(worker.jobs), default=None)

    def _send_reserved(self, number: int, job: Job) -> None:
        worker = self._workers.get(number)
        if worker is None or worker.retiring:
            self._answer(job, Reply("the environment is gone", ToolErrorKind.DIED))
            return
        worker.jobs[job.id] = job
        if worker.link is not None:
            self._send(worker, job)

    def _send(self, worker: WorkerRecord, job: Job) -> None:
        assert worker.link is not None
        job.started = time.monotonic()
        job.timer = self._loop.call_later(job.timeout_s, self._on_deadline, worker, job)
        worker.link.send(job.message)

    def _on_deadline(self, worker: WorkerRecord, job: Job) -> None:
        if job.answered or self._workers.get(worker.number) is not worker:
            return
        self._answer(job, Reply(f"no answer within {job.timeout_s:g} s", ToolErrorKind.TIMEOUT))
        if job.is_async and not worker.alone and worker.link is not None:
            worker.link.send({"op": "cancel", "id": job.id})
            self._loop.call_later(_CANCEL_GRACE_S, self._on_cancel_ignored, worker, job)
            return
        self._retire(worker)
        self._bury_if_done(worker)

    def _on_cancel_ignored(self, worker: WorkerRecord, job: Job) -> None:
        if job.id in worker.jobs:
            self._retire(worker)
            self._bury_if_done(worker)

    def _answer(self, job: Job, reply: Reply) -> None:
        if job.answered:
            return
        job.answered = True
        if job.timer is not None:
            job.timer.cancel()
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(reply.timed(job.started, time.monotonic()))

    # --- on the loop: who is still there -----------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Find workers that do not start, and workers that several calls wait for and that say nothing.

        A tick that comes late was held up by the machine, which may have held the workers up too: it counts as two.
        """
        now = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            before, now = now, time.monotonic()
            for worker in list(self._workers.values()):
                if worker.link is not None and not worker.ready and now - worker.born > _START_TIMEOUT_S:
                    self._lose(worker, "the process of the tool did not start")
                elif worker.ready and len(worker.jobs) > 1 and worker.waiting:
                    self._listen_to(worker, min(now - before, 2 * _TICK_S))

    def _listen_to(self, worker: WorkerRecord, passed_s: float) -> None:
        if worker.silent_s is None:
            worker.silent_s = 0.0
            assert worker.link is not None
            worker.link.send({"op": "ping"})
            return
        worker.silent_s += passed_s
        if worker.silent_s > min(self._options.frozen_after_s, min(j.timeout_s for j in worker.waiting) / 4):
            self._lose(worker, "the process of the tool stopped answering")
