"""Give calls to workers, keep their deadlines, and replace workers and supervisors that are lost.

Invariants, on one event loop:

* Every job's future gets one reply: the tool's, TIMEOUT at its deadline, DIED, ToolExecutorError.
* A call that overruns is answered at its deadline; its worker takes no new calls, is replaced at
  once, and killed when the other calls on it are done, unless a coroutine ends when cancelled.
* A call has begun when its worker said so, which it does before any code of the tool runs. One that
  has not begun when its worker or the supervisor is gone, or its worker cannot begin it, goes to
  another as if nothing had been.
* A worker that dies with one begun call on it costs that call. With several, nobody knows which did
  it; and one that stops answering while others wait (a tool that holds the interpreter lock) may
  yet have come to its end: each begun call runs once more, alone in a process of its own, with a
  deadline of its own. So a call may run twice, for the sake of a fellow call only; `isolate=True`
  calls and environment methods never do.
* A supervisor that is gone takes its workers with it: begun calls are DIED, the others run under
  the next supervisor. Nothing is sent to one that is gone, and no start is counted that had none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.errors import PluginError, ToolExecutorError
from toolgrpo.tools.base import Reply
from toolgrpo.tools.plugin.plugin_file import PluginSpec
from toolgrpo.tools.workers.connections import SupervisorLink, WorkerLink
from toolgrpo.tools.workers.output_log import OutputLog
from toolgrpo.tools.workers.pool_records import Job, WorkerKind, WorkerRecord, describe_ending
from toolgrpo.tools.workers.tool_worker import PoolOptions

_logger = logging.getLogger(__name__)
_TICK_S = 0.1
_EXIT_STATUS_S = 1.0  # how long the exit status may come after the end of the connection
_CANCEL_GRACE_S = 0.5
_MAX_START_FAILURES = 5
_MAX_LOSSES = 10  # of supervisors in a row: none served for long, or came to a worker that takes calls
_STABLE_S = 60.0
_MAX_RETURNS = 8  # of one call that no worker begins


class Dispatcher:
    """The calls, workers and supervisor as the pool sees them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hello: Mapping[str, Any], options: PoolOptions, log: OutputLog
    ) -> None:
        self._loop = loop
        self._options = options
        self._log = log
        self.numbers = itertools.count(1)  # of new workers
        self._workers: dict[int, WorkerRecord] = {}
        self._queue: deque[Job] = deque()
        self._start_failures = 0
        self._has_functions = False
        self._closing = False
        self._hello = hello
        self._supervisor: SupervisorLink | None = None
        self._serving_since = 0.0
        self._losses = 0
        self._restarting: asyncio.Task[None] | None = None
        self.broken: ToolExecutorError | None = None

    async def open(self) -> PluginSpec:
        """Start the supervisor and its workers; PluginError if the plugin cannot be used."""
        spec = await self._start_supervisor()
        self._loop.create_task(self._tick())
        return spec

    # --- life of the supervisor ------------------------------------------------------------------------

    @property
    def _serving(self) -> SupervisorLink | None:
        """The supervisor, while it can be asked for workers."""
        return self._supervisor if self._supervisor is not None and self._supervisor.serving else None

    async def _start_supervisor(self) -> PluginSpec:
        self._supervisor = SupervisorLink(self._hello, self._log)
        spec = await self._supervisor.start(
            self._options.load_timeout_s, on_exited=self._on_exited, on_lost=self._on_supervisor_lost
        )
        self._serving_since = time.monotonic()
        self._has_functions = bool(spec.functions)
        for worker in self._workers.values():  # reserved while there was no supervisor
            self._loop.create_task(self._connect(worker))
        self._refill()
        self._dispatch()
        return spec

    def _on_supervisor_lost(self) -> None:
        if self._closing:
            return
        _logger.warning("the supervisor of the tool workers is gone; starting another")
        if time.monotonic() - self._serving_since > _STABLE_S:
            self._losses = 0
        self._restarting = self._loop.create_task(self._restart_supervisor())
        for worker in list(self._workers.values()):
            self._forget(worker)
            # no code of its environment has run, so nothing is lost with it; else the state is, and its calls cannot
            # go on
            if worker.kind is WorkerKind.RESERVED and not worker.touched and not worker.retiring:
                self._workers[worker.number] = worker.anew()  # the next supervisor can start it
            else:
                self._settle(worker, "the process of the tools went away", culprit_known=True)

    async def _restart_supervisor(self) -> None:
        """Start another when what the lost one left is gone; give up when that does not help."""
        assert self._supervisor is not None
        await self._supervisor.stop()
        while not self._closing:
            self._losses += 1
            try:
                await self._start_supervisor()
                return
            except (PluginError, ToolExecutorError) as error:
                if not self._supervisor.was_killed or self._losses >= _MAX_LOSSES:  # an import does not kill itself
                    self._break(f"the tool workers could not be started again: {error}")
                    return

    async def shut_down(self) -> None:
        self._closing = True
        # before the workers are forgotten: a deadline answers only calls whose worker is known, so these would wait
        # for ever
        for job in [*self._queue, *(job for worker in self._workers.values() for job in worker.jobs.values())]:
            job.answer(Reply("the tools were shut down", ToolErrorKind.DIED))
        for worker in self._workers.values():
            if worker.link is not None:
                worker.link.close()
        self._workers.clear()
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._restarting is not None:
            await self._restarting
        self._log.close()

    def _break(self, reason: str) -> None:
        tail = self._log.tail
        printed = f"The last that was printed there:\n{tail}" if tail else "Nothing was printed there."
        self.broken = ToolExecutorError(f"{reason}. {printed}")
        _logger.error("%s", self.broken)
        # calls on workers that are ready keep their worker, and with it their answer or deadline
        never_begin = [job for worker in self._workers.values() if not worker.ready for job in worker.waiting]
        for job in (*self._queue, *never_begin):
            job.refuse(self.broken)
        self._queue.clear()

    # --- life of a worker ------------------------------------------------------------------------------

    def _has(self, worker: WorkerRecord) -> bool:
        return self._workers.get(worker.number) is worker

    def _refill(self) -> None:
        """Start as many shared workers as are missing."""
        if self._serving is None or not self._has_functions or self._closing or self.broken is not None:
            return
        shared = sum(1 for worker in self._workers.values() if worker.kind is WorkerKind.SHARED and not worker.retiring)
        for _ in range(self._options.workers - shared):
            self.spawn(next(self.numbers), WorkerKind.SHARED)

    def spawn(self, number: int, kind: WorkerKind) -> WorkerRecord:
        worker = WorkerRecord(number, kind, born=time.monotonic(), retiring=kind is WorkerKind.SINGLE)
        self._workers[number] = worker
        if self._serving is not None:
            self._loop.create_task(self._connect(worker))
        return worker

    async def _connect(self, worker: WorkerRecord) -> None:
        supervisor = self._serving
        if supervisor is None or not self._has(worker):
            return
        # its time to load counts from here: a reserved one may have waited for a supervisor
        worker.born = time.monotonic()
        ours, theirs = socket.socketpair()
        supervisor.spawn(worker.number, theirs)
        link = WorkerLink(ours, partial(self._on_message, worker), partial(self._on_hung_up, worker))
        await self._loop.create_connection(lambda: link, sock=ours)
        if self._has(worker) and self._serving is supervisor:
            worker.link = link
        else:  # given up meanwhile
            link.close()

    def _on_message(self, worker: WorkerRecord, message: dict[str, Any]) -> None:
        # any message shows that it lives, not only the reply to a ping
        worker.silent_s = None
        if "begun" in message:
            worker.touched = True
            if (job := worker.jobs.get(message["begun"])) is not None:
                job.begun = True
            return
        if message.get("op") == "ready" and not worker.ready:
            worker.ready = True
            self._start_failures = 0
            self._losses = 0
            for job in worker.waiting:  # of an environment, or the one that it is for
                self._send(worker, job)
        elif "returned" in message:
            job = worker.jobs.pop(message["returned"], None)
            if job is not None and not job.answered and not job.begun:
                self._queue_again(job)
        elif "id" in message:
            job = worker.jobs.pop(message["id"], None)
            if job is not None:
                job.answer(Reply.from_message(message))
        if message.get("retire") and worker.kind is WorkerKind.SHARED:  # the others have no fellow calls to guard
            self._retire(worker, str(message["retire"]))
        self._end_if_done(worker)
        self._dispatch()

    def _on_exited(self, number: int, status: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            self._lose(worker, describe_ending(status))

    def _on_hung_up(self, worker: WorkerRecord) -> None:
        """Send no new calls there: the socket ended. The exit status usually says more later."""
        if self._has(worker):
            worker.hung_up = True
            self._loop.call_later(_EXIT_STATUS_S, self._lose, worker, "the process of the tool closed its connection")

    def _lose(self, worker: WorkerRecord, how: str, *, frozen: bool = False) -> None:
        """Decide about the calls of a worker that is gone or given up, and replace it."""
        if not self._forget(worker):
            return
        self._kill(worker)
        # a worker that is retiring was given up, and has not failed to start; a single one retires from its birth
        if not worker.ready and (worker.kind is WorkerKind.SINGLE or not worker.retiring) and not self._closing:
            self._start_failures += 1
            if self._start_failures >= _MAX_START_FAILURES:
                self._break("tool workers end before they can take a call")
        n_begun = sum(job.begun for job in worker.jobs.values())
        self._settle(worker, how, culprit_known=n_begun == 1 and not frozen)
        self._refill()
        self._dispatch()

    def _forget(self, worker: WorkerRecord) -> bool:
        """Take it off the list, noting all it still had to say; False if it is off already."""
        if not self._has(worker):
            return False
        del self._workers[worker.number]
        if worker.link is not None:
            worker.link.finish()
        return True

    def _settle(self, worker: WorkerRecord, how: str, *, culprit_known: bool) -> None:
        """Decide about the calls of a worker that is gone."""
        may_begin_again = worker.kind is not WorkerKind.RESERVED
        # each goes to the front of the queue, so the last comes first
        for job in reversed(worker.waiting):
            if may_begin_again and not job.begun:
                self._queue_again(job)
            elif may_begin_again and not culprit_known and worker.kind is WorkerKind.SHARED:
                _logger.info("a tool worker was lost (%s); a call on it runs again, alone", how)
                job.alone = True
                self._queue_again(job)
            else:
                job.answer(Reply(how, ToolErrorKind.DIED))

    def _queue_again(self, job: Job) -> None:
        """Queue a call that did not begin where it was sent, or that is to run alone."""
        job.take_back()
        job.returns += 1
        if self.broken is not None:
            job.refuse(self.broken)
        elif job.returns > _MAX_RETURNS:
            job.answer(Reply("no process of the tools could begin this call", ToolErrorKind.DIED))
        else:
            self._queue.appendleft(job)

    def _retire(self, worker: WorkerRecord, why: str) -> None:
        """Replace a worker now, and end it when its last caller has an answer."""
        if worker.retiring:
            return
        _logger.info("a tool worker is replaced: %s", why)
        worker.retiring = True
        # calls that have not begun need not wait here: the worker may be stuck with the others
        worker.recall()
        if worker.kind is WorkerKind.SHARED:
            self._refill()

    def _end_if_done(self, worker: WorkerRecord) -> None:
        if worker.retiring and not worker.waiting and self._has(worker):
            del self._workers[worker.number]
            self._kill(worker)

    def _kill(self, worker: WorkerRecord) -> None:
        if worker.link is not None:
            worker.link.close()
        if (supervisor := self._serving) is not None:
            supervisor.kill(worker.number)

    def release(self, number: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.retiring = True
            for job in worker.waiting:
                job.answer(Reply("the episode ended", ToolErrorKind.DIED))
            self._end_if_done(worker)

    # --- life of a job ----------------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        if self.broken is not None:
            job.refuse(self.broken)
            return
        self._queue.append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting jobs to workers that have room; the least loaded first."""
        if self._serving is None:
            return
        held_back: list[Job] = []
        while self._queue:
            job = self._queue.popleft()
            if job.future.cancelled():  # its episode is over
                continue
            worker = self._worker_for(job)
            if worker is None:
                held_back.append(job)
                if not job.alone and self._shared_worker(needs_loop=False) is None:
                    break
                continue  # it waits for a loop that is free, or for its turn to be alone; others need not
            self._send(worker, job)
        self._queue.extendleft(reversed(held_back))

    def _worker_for(self, job: Job) -> WorkerRecord | None:
        if not job.alone:
            return self._shared_worker(needs_loop=job.is_async)
        n_single = sum(worker.kind is WorkerKind.SINGLE for worker in self._workers.values())
        return self.spawn(next(self.numbers), WorkerKind.SINGLE) if n_single < self._options.threads else None

    def _shared_worker(self, *, needs_loop: bool) -> WorkerRecord | None:
        most_calls = self._options.threads
        free = [worker for worker in self._workers.values() if worker.takes_one_more(most_calls, needs_loop=needs_loop)]
        return min(free, key=lambda worker: len(worker.jobs), default=None)

    def send_reserved(self, number: int, job: Job) -> None:
        worker = self._workers.get(number)
        if worker is None or worker.retiring:
            job.answer(Reply("the environment is gone", ToolErrorKind.DIED))
            return
        if self.broken is not None and not worker.ready:
            job.refuse(self.broken)
            return
        self._send(worker, job)

    def _send(self, worker: WorkerRecord, job: Job) -> None:
        """Give a call to a worker; one that is not ready gets it when it says so, and only then its deadline begins."""
        worker.jobs[job.id] = job
        if not worker.ready:
            return
        assert worker.link is not None
        job.started = time.monotonic()
        job.timer = self._loop.call_later(job.timeout_s, self._on_deadline, worker, job)
        worker.link.send(job.message)

    def _on_deadline(self, worker: WorkerRecord, job: Job) -> None:
        if job.answered or not self._has(worker):
            return
        job.answer(Reply(f"no answer within {job.timeout_s:g} s", ToolErrorKind.TIMEOUT))
        if job.is_async and worker.kind is WorkerKind.SHARED and worker.link is not None:
            worker.link.send({"op": "cancel", "id": job.id})
            worker.recall()  # the loop may be blocked
            self._loop.call_later(_CANCEL_GRACE_S, self._on_overdue, worker, job)
        else:
            self._on_overdue(worker, job)

    def _on_overdue(self, worker: WorkerRecord, job: Job) -> None:
        if job.id in worker.jobs and self._has(worker):
            self._retire(worker, f"a call had no answer within {job.timeout_s:g} s")
            self._end_if_done(worker)
            self._dispatch()  # one that ran alone leaves room for another

    # --- who is still there -----------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Find workers that do not start, and silent workers that several calls wait for.

        A tick that comes late counts as two: the machine may have held the workers up too.
        """
        now = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            before, now = now, time.monotonic()
            for worker in list(self._workers.values()):
                waits_for_begin = worker.kind is WorkerKind.SHARED and worker.unbegun
                if not worker.ready:
                    if self._serving and now - worker.born > self._options.load_timeout_s:
                        self._lose(worker, "the process of the tool did not start")
                # one begun call alone harms only itself, and its deadline ends it: a long silence there may be work
                elif worker.waiting and (len(worker.jobs) > 1 or waits_for_begin):
                    self._listen_to(worker, now, min(now - before, 2 * _TICK_S))

    def _listen_to(self, worker: WorkerRecord, now: float, passed_s: float) -> None:
        patience_s = worker.patience_s
        if worker.kind is WorkerKind.SHARED and any(now - job.started > patience_s for job in worker.unbegun):
            self._retire(worker, "it begins no calls")  # it may answer all the same: then only its loop is blocked
        if worker.silent_s is None:
            worker.silent_s = 0.0
            assert worker.link is not None
            worker.link.send({"op": "ping"})
            return
        worker.silent_s += passed_s
        if worker.silent_s > patience_s:
            self._lose(worker, "the process of the tool stopped answering", frozen=True)
