"""The trainer's side of the tool workers, for any thread: calls in, futures out.

All state belongs to a `Dispatcher` on an event loop on a thread of its own (`LoopThread`). Why none
of the existing pools (pebble, loky, anyio) is used stands in `supervisor.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from toolgrpo.errors import ToolExecutorError
from toolgrpo.tools.base import Reply
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.plugin_file import PluginSpec
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.workers.dispatcher import Dispatcher
from toolgrpo.tools.workers.output_log import OutputLog
from toolgrpo.tools.workers.pool_records import Job, WorkerKind
from toolgrpo.tools.workers.tool_worker import PoolOptions

_CLOSE_TIMEOUT_S = 60.0


class WorkerPool:
    """Runs jobs in worker processes under one supervisor."""

    def __init__(self, hello: Mapping[str, Any], options: PoolOptions, log: OutputLog) -> None:
        self._pid = os.getpid()
        self._job_ids = itertools.count(1)
        self._closing = False
        self._thread = LoopThread("toolgrpo-tools")
        self._loop = self._thread.loop
        told = {**hello, "options": asdict(options), "folder": os.getcwd()}
        self._dispatcher = Dispatcher(self._loop, told, options, log)
        try:
            self.spec: PluginSpec = self._thread.submit(self._dispatcher.open()).result()
        except BaseException:
            self.close()
            raise

    def submit(self, spec: ToolSpec, arguments: Mapping[str, Any], timeout_s: float) -> Future[Reply]:
        """Run a call of a stateless tool on some worker."""
        message = {"op": "call", "tool": spec.name, "args": dict(arguments)}
        job = self._job(message, timeout_s, alone=spec.isolate, is_async=spec.is_async)
        self._loop.call_soon_threadsafe(self._dispatcher.enqueue, job)
        return job.future

    def reserve(self) -> int:
        """Reserve a worker for an environment.

        Calls go there with `submit_on`; `release` ends it.
        """
        number = next(self._dispatcher.numbers)
        self._loop.call_soon_threadsafe(self._dispatcher.spawn, number, WorkerKind.RESERVED)
        return number

    def submit_on(self, number: int, message: Mapping[str, Any], timeout_s: float) -> Future[Reply]:
        """Run a call on a reserved worker; DIED if that worker is gone."""
        job = self._job(message, timeout_s, alone=True, is_async=False)
        self._loop.call_soon_threadsafe(self._dispatcher.send_reserved, number, job)
        return job.future

    def release(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._dispatcher.release, number)

    def close(self) -> None:
        """Kill every worker.

        Safe to call twice, and in a fork of the trainer, where there is nothing to kill.
        """
        if not self._closing and os.getpid() == self._pid:
            self._closing = True
            self._thread.submit(self._dispatcher.shut_down()).result(timeout=_CLOSE_TIMEOUT_S)
            self._thread.close()

    def _job(self, message: Mapping[str, Any], timeout_s: float, *, alone: bool, is_async: bool) -> Job:
        if self._closing:
            raise ToolExecutorError("this toolbox is closed; load it again to call its tools")
        if self._dispatcher.broken is not None:
            raise self._dispatcher.broken
        if os.getpid() != self._pid:
            raise ToolExecutorError(
                "this toolbox was loaded by another process, and a fork of it cannot call its tools; load them here"
            )
        job_id = next(self._job_ids)
        return Job(job_id, {**message, "id": job_id}, timeout_s, alone, is_async, Future())
