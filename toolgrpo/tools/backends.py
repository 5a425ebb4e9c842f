"""Where calls go: one backend per kind of tool, one session of each per episode."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from toolgrpo.tools.base import AfterTurn
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.tool_reply import Reply
from toolgrpo.tools.workers.pool import WorkerPool

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


class BackendSession(Protocol):
    """One backend as one episode sees it. `open` comes first, `close` last and always."""

    @property
    def observation(self) -> str | None: ...

    async def open(self) -> None: ...

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply: ...

    async def reward(self) -> float | None: ...

    async def after_turn(self) -> AfterTurn: ...

    async def next_user_message(self, answer: str) -> str | None: ...

    async def close(self) -> None: ...


class ToolBackend(Protocol):
    """A source of tools that is running."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    def session(self, row: Mapping[str, Any]) -> BackendSession: ...

    def close(self) -> None: ...


class StatelessBackend(ABC):
    """A backend whose calls know nothing of episodes: all sessions are alike, and answers may be
    cached.
    """

    def __init__(self, specs: Sequence[ToolSpec], timeout_s: float, *, cache_all: bool) -> None:
        self.specs = specs
        self._timeout_s = timeout_s
        self._cache_all = cache_all
        self._cache = ResultCache()

    @abstractmethod
    def submit(self, spec: ToolSpec, arguments: Mapping[str, Any], timeout_s: float) -> Future[Reply]: ...

    @abstractmethod
    def close(self) -> None: ...

    def session(self, row: Mapping[str, Any]) -> BackendSession:
        return _StatelessSession(self)

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply:
        timeout_s = spec.timeout_s or self._timeout_s
        if spec.cache is False or not (spec.cache or self._cache_all):
            return await asyncio.wrap_future(self.submit(spec, arguments, timeout_s))
        asked = time.monotonic()
        lookup = self._cache.get(spec.name, arguments, lambda: self.submit(spec, arguments, timeout_s))
        reply = await asyncio.shield(asyncio.wrap_future(lookup.future))  # others may wait for the same answer
        # a hit took as long as it was waited for here, not as long as the call once did
        return replace(reply, cached=True, started=asked, ended=time.monotonic()) if lookup.hit else reply


class _StatelessSession:
    """An episode's view of a stateless backend."""

    observation = None

    def __init__(self, backend: StatelessBackend) -> None:
        self._backend = backend

    async def open(self) -> None:
        """Do nothing: there is nothing to open."""

    async def call(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> Reply:
        return await self._backend.call(spec, arguments)

    async def after_turn(self) -> AfterTurn:
        return AfterTurn()

    async def next_user_message(self, answer: str) -> str | None:
        return None

    async def reward(self) -> float | None:
        return None

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class FunctionBackend(StatelessBackend):
    """Plain functions in worker processes."""

    def __init__(self, pool: WorkerPool, specs: Sequence[ToolSpec], timeout_s: float, *, cache_all: bool) -> None:
        super().__init__(specs, timeout_s, cache_all=cache_all)
        self._pool = pool

    def submit(self, spec: ToolSpec, arguments: Mapping[str, Any], timeout_s: float) -> Future[Reply]:
        message = {"op": "call", "tool": spec.name, "args": dict(arguments)}
        return self._pool.submit(message, timeout_s, alone=spec.isolate, is_async=spec.is_async)

    def close(self) -> None:
        self._pool.close()
