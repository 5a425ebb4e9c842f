"""The backends that run calls: one per kind of tool, with one session per episode. That of MCP servers is in `mcp/`."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from confined_python.processes.wire import pack_objects
from toolgrpo.episode.dropped import DropEpisode, EnvironmentLost
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.errors import PluginError
from toolgrpo.tools.base import EpisodeHooks, Reply
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.plugin_file import EnvironmentSpec, LoadedTool
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.render import describe_failure, render_result
from toolgrpo.tools.workers.pool import WorkerPool

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_OPEN_ATTEMPTS = 2
_CLOSE_TIMEOUT_S = 5.0
_GONE = (ToolErrorKind.TIMEOUT, ToolErrorKind.DIED)


# Answers of pure tools, remembered for a run.
#
# Same name and same arguments, same answer; a call that is still running is shared too. Only good
# answers stay, and only so many and so much text of them that a long run does not grow by them. What
# stays is the answer alone: a finished future would keep the event loops of all who waited for it.

_Call = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """A reply to wait for, and whether somebody asked before."""

    future: Future[Reply]
    hit: bool


class ResultCache:
    """The most recently used answers; safe from any thread."""

    def __init__(self, max_entries: int = 10_000, max_chars: int = 16 * 2**20) -> None:
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._running: dict[_Call, Future[Reply]] = {}
        self._answers: OrderedDict[_Call, Reply] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, name: str, arguments: Mapping[str, Any], run: Callable[[], Future[Reply]]) -> CacheLookup:
        """Return what is known for this call, or what `run` starts."""
        call = (name, json.dumps(arguments, sort_keys=True))
        with self._lock:
            known = self._answers.get(call)
            if known is not None:
                self._answers.move_to_end(call)
                answered: Future[Reply] = Future()
                answered.set_result(known)
                return CacheLookup(answered, hit=True)
            running = self._running.get(call)
            if running is not None:
                return CacheLookup(running, hit=True)
            future = self._running[call] = run()
        future.add_done_callback(lambda done: self._ended(call, done))
        return CacheLookup(future, hit=False)

    def _ended(self, call: _Call, done: Future[Reply]) -> None:
        """Keep a good answer, and drop the oldest ones beyond the bounds."""
        good = not done.cancelled() and done.exception() is None and done.result().error is None
        with self._lock:
            self._running.pop(call, None)
            if not good:
                return
            self._answers[call] = done.result()
            self._chars += _chars(call, done.result())
            while len(self._answers) > self._max_entries or self._chars > self._max_chars:
                self._chars -= _chars(*self._answers.popitem(last=False))


def _chars(call: _Call, reply: Reply) -> int:
    return sum(map(len, call)) + len(reply.text)


class BackendSession(EpisodeHooks, ABC):
    """One backend as one episode sees it. `open` comes first, `leave` last and always."""

    @abstractmethod
    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply: ...

    async def open(self) -> None:
        """Make ready for the first call."""

    async def leave(self) -> None:
        """End what the episode has opened."""


class ToolBackend(Protocol):
    """A source of tools that is running."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    def session(self, row: Mapping[str, Any]) -> BackendSession: ...

    def close(self) -> None: ...


class CallRunner(Protocol):
    """Runs calls of plain functions: in worker processes (`WorkerPool`), or in this one (`InProcess`)."""

    def submit(self, spec: ToolSpec, arguments: Mapping[str, Any], timeout_s: float) -> Future[Reply]: ...

    def close(self) -> None: ...


class FunctionBackend(BackendSession):
    """Plain functions, whose calls know nothing of episodes: it is the session of each, and answers may be cached."""

    def __init__(self, runner: CallRunner, specs: Sequence[ToolSpec], timeout_s: float, *, cache_all: bool) -> None:
        self.specs = specs
        self._runner = runner
        self._timeout_s = timeout_s
        self._cache_all = cache_all
        self._cache = ResultCache()

    def session(self, row: Mapping[str, Any]) -> BackendSession:
        return self

    def close(self) -> None:
        self._runner.close()

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply:
        timeout_s = spec.timeout_s or self._timeout_s
        if spec.cache is False or not (spec.cache or self._cache_all):
            return await asyncio.wrap_future(self._runner.submit(spec, arguments, timeout_s))
        asked = time.monotonic()
        lookup = self._cache.get(spec.name, arguments, lambda: self._runner.submit(spec, arguments, timeout_s))
        reply = await asyncio.shield(asyncio.wrap_future(lookup.future))  # others may wait for the same answer
        # a hit took as long as it was waited for here, not as long as the call once did
        return replace(reply, cached=True, started=asked, ended=time.monotonic()) if lookup.hit else reply


class InProcess:
    """Functions in the trainer's process: each call on a thread, coroutines on a loop of their own.

    Deadlines are kept towards the model, but nothing can end such a tool: a call that overruns keeps
    its thread, and a crash is the trainer's. `@tool(in_process=True)` is for tools that need the
    trainer's own objects.
    """

    def __init__(self, tools: Sequence[LoadedTool], max_result_chars: int) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}
        self._max_result_chars = max_result_chars
        self._deadlines = LoopThread("toolgrpo-in-process")
        self._coroutines = LoopThread("toolgrpo-in-process-async")

    def submit(self, spec: ToolSpec, arguments: Mapping[str, Any], timeout_s: float) -> Future[Reply]:
        return self._deadlines.submit(self._run(self._tools[spec.name], arguments, timeout_s))

    def close(self) -> None:
        self._coroutines.close()
        self._deadlines.close()

    async def _run(self, tool: LoadedTool, arguments: Mapping[str, Any], timeout_s: float) -> Reply:
        started = time.monotonic()
        running: Future[Reply] = Future()
        if tool.spec.is_async:
            running = self._coroutines.submit(self._call_async(tool, arguments))
        else:
            running.set_running_or_notify_cancel()  # nobody can cancel it from here on
            threading.Thread(target=self._call, args=(tool, arguments, running), daemon=True).start()
        try:
            reply = await asyncio.wait_for(asyncio.wrap_future(running), timeout_s)
        except TimeoutError:
            reply = Reply(f"no answer within {timeout_s:g} s", ToolErrorKind.TIMEOUT)
        return reply.timed(started, time.monotonic())

    def _call(self, tool: LoadedTool, arguments: Mapping[str, Any], result: Future[Reply]) -> None:
        try:
            value = tool.call(arguments)
            reply = self._rendered(self._coroutines.submit(value).result() if inspect.iscoroutine(value) else value)
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            reply = _failed(error)
        result.set_result(reply)

    async def _call_async(self, tool: LoadedTool, arguments: Mapping[str, Any]) -> Reply:
        try:
            return self._rendered(await tool.call(arguments))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            return _failed(error)

    def _rendered(self, value: object) -> Reply:
        rendered = render_result(value, self._max_result_chars)
        return Reply(rendered.text, left_out=rendered.left_out)


def _failed(error: BaseException) -> Reply:
    kind, text = describe_failure(error)
    return Reply(text, kind)


# Stateful tools: one instance of an environment class per episode, each in a process of its own.
#
# A process each, because a state that hangs or dies must cost its own episode and no other. Calls of
# one turn run one after the other, in call order, as the methods share their instance's state; none
# is ever run twice. After a call that overran or killed the process, the environment is gone: later
# calls are told so, and where it was to give the reward there is none (`EnvironmentLost`, never 0).
#
# `DropEpisode` in `reset` or the reward method is raised here; in another method it is the reply.


@dataclass(frozen=True, slots=True)
class EnvironmentBackend:
    """Instances of one environment class."""

    pool: WorkerPool
    spec: EnvironmentSpec
    timeout_s: float

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.spec.tools

    @property
    def speaks(self) -> bool:
        return "next_user_message" in self.spec.hooks

    def session(self, row: Mapping[str, Any]) -> EnvironmentSession:
        return EnvironmentSession(self, row)

    def close(self) -> None:
        self.pool.close()


class EnvironmentSession(BackendSession):
    """One instance, for one episode."""

    def __init__(self, backend: EnvironmentBackend, row: Mapping[str, Any]) -> None:
        self._pool, self._spec, self._timeout_s = backend.pool, backend.spec, backend.timeout_s
        self._row = row
        self._worker: int | None = None
        self._lost_by = "it was never opened"
        self._one_at_a_time = asyncio.Lock()
        self._observation: str | None = None

    @property
    def observation(self) -> str | None:
        return self._observation

    async def open(self) -> None:
        """Make the instance and reset it with the row.

        A reset that raises is the plugin's error, and ends the run, but for `DropEpisode`.
        """
        row = pack_objects(dict(self._row))
        for attempt in range(1, _OPEN_ATTEMPTS + 1):
            self._worker = self._pool.reserve()
            reply = await self._send({"op": "open", "row": row}, self._timeout_s)
            if reply.error is None:
                self._observation = None if reply.silent else reply.text
                return
            self._release()
            if reply.error is ToolErrorKind.DROPPED:
                raise DropEpisode(reply.text)
            if reply.error not in _GONE:
                raise PluginError(
                    f"environment {self._spec.name}: reset raised for a row with the columns {sorted(self._row)}: "
                    f"{reply.text}. {_advice(reply.text)}"
                )
            _logger.warning("environment %s: reset failed (%s), attempt %d", self._spec.name, reply.text, attempt)
        raise EnvironmentLost(
            f"environment {self._spec.name}: reset failed {_OPEN_ATTEMPTS} times, last with: {reply.text}"
        )

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply:
        async with self._one_at_a_time:
            message = {"op": "method", "tool": spec.name, "args": dict(arguments)}
            reply = await self._send(message, spec.timeout_s or self._timeout_s)
            if reply.error in _GONE:
                self._lose(f"{spec.name}: {reply.text}")
            return reply

    async def ask(self, hook: str, *args: str, read: Callable[[str], T]) -> T | None:
        """Ask the instance; one that is gone is `EnvironmentLost`."""
        if hook not in self._spec.hooks:
            return None
        if self._worker is None:
            raise EnvironmentLost(f"environment {self._spec.name}: {self._lost_by}")
        reply = await self._send({"op": "hook", "method": hook, "args": args}, self._timeout_s)
        if reply.error in _GONE:
            self._lose(f"{hook}: {reply.text}")
            raise EnvironmentLost(f"environment {self._spec.name}: {self._lost_by}")
        if reply.error is ToolErrorKind.DROPPED:
            raise DropEpisode(reply.text)
        if reply.error is not None:
            raise PluginError(f"environment {self._spec.name}: {hook} failed: {reply.text}")
        try:
            return None if reply.silent else read(reply.text)
        except ValueError as error:
            raise PluginError(f"environment {self._spec.name}: {hook} {error}") from error

    async def leave(self) -> None:
        """Let the instance clean up, within a short time, and end its process."""
        try:
            if self._worker is not None and "close" in self._spec.hooks:
                message = {"op": "hook", "method": "close", "args": ()}
                reply = await self._send(message, min(self._timeout_s, _CLOSE_TIMEOUT_S))
                if reply.error is not None:
                    _logger.warning("environment %s: close failed: %s", self._spec.name, reply.text)
        finally:
            self._release()

    async def _send(self, message: Mapping[str, Any], timeout_s: float) -> Reply:
        if self._worker is None:
            return Reply("the environment is gone since an earlier call failed", ToolErrorKind.DIED)
        return await asyncio.wrap_future(self._pool.submit_on(self._worker, message, timeout_s))

    def _lose(self, why: str) -> None:
        if self._worker is not None:
            _logger.info("environment %s is lost: %s", self._spec.name, why)
            self._lost_by = why
            self._release()

    def _release(self) -> None:
        if self._worker is not None:
            self._pool.release(self._worker)
            self._worker = None


def _advice(problem: str) -> str:
    if "__init__()" in problem:
        return "The class is made without arguments: give those of __init__ defaults, or take them in reset(**row)."
    if "unexpected keyword argument" in problem:
        return "Let reset accept every column of the dataset, for instance with **row."
    if "required positional argument" in problem or "required keyword-only argument" in problem:
        return (
            "Give the row a column for it; to try the tools by hand: run_tool(toolbox, calls, row={...}) or "
            "toolbox.session({...})."
        )
    return "Fix reset, or the row."
