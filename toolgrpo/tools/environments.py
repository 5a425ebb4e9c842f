"""Stateful tools: one instance of an environment class per episode, each in a process of its own.

A process each, because a state that hangs or dies must cost its own episode and no other. Calls of
one turn run one after the other, in call order, as the methods share their instance's state; none
is ever run twice. After a call that overran or killed the process, the environment is gone: later
calls are told so, and where it was to give the reward there is none (`EnvironmentLost`, never 0).

`DropEpisode` in `reset` or the reward method is raised here; in another method it is the reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from toolgrpo.calls import ToolErrorKind
from toolgrpo.drops import DropEpisode, EnvironmentLost
from toolgrpo.errors import PluginError
from toolgrpo.processes.wire import pack_objects
from toolgrpo.tools.backends import BackendSession
from toolgrpo.tools.base import Reply
from toolgrpo.tools.plugin.loaded_plugin import EnvironmentSpec
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.workers.pool import WorkerPool

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_OPEN_ATTEMPTS = 2
_CLOSE_TIMEOUT_S = 5.0
_GONE = (ToolErrorKind.TIMEOUT, ToolErrorKind.DIED)


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
    if "unexpected keyword argument" in problem:
        return "Let reset accept every column of the dataset, for instance with **row."
    if "required positional argument" in problem or "required keyword-only argument" in problem:
        return (
            "Give the row a column for it; to try the tools by hand: run_tool(toolbox, calls, row={...}) or "
            "toolbox.session({...})."
        )
    return "Mend reset, or the row."
