"""One supervisor of the tool workers at a time: started, started again when it is lost, given up
when that does not help.

What a lost one left is gone before another is started. One that is killed while it imports the
plugin is started again too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolgrpo.errors import PluginError, ToolExecutorError
from toolgrpo.tools.plugin.loaded_plugin import PluginSpec
from toolgrpo.tools.workers.connections import SupervisorLink
from toolgrpo.tools.workers.output_log import OutputLog

_logger = logging.getLogger(__name__)
_MAX_LOSSES = 10  # in a row: none served for long, or came to a worker that takes calls
_STABLE_S = 60.0


@dataclass(frozen=True, slots=True)
class SupervisionEvents:
    """What the dispatcher is told, on the loop."""

    serving: Callable[[PluginSpec], None]  # a supervisor can be asked for workers
    lost: Callable[[], None]  # it is gone, and its workers with it
    exited: Callable[[int, int], None]  # a worker's number and status
    given_up: Callable[[str], None]  # there will be no other, and why


class Supervision:
    """The supervisor that there is now, if any."""

    def __init__(
        self, hello: Mapping[str, Any], load_timeout_s: float, log: OutputLog, events: SupervisionEvents
    ) -> None:
        self._hello = hello
        self._load_timeout_s = load_timeout_s
        self._log = log
        self._events = events
        self._link: SupervisorLink | None = None
        self._losses = 0
        self._serving_since = 0.0
        self._stopping = False
        self._restarting: asyncio.Task[None] | None = None

    @property
    def serving(self) -> SupervisorLink | None:
        """The supervisor, while it can be asked for workers."""
        return self._link if self._link is not None and self._link.serving else None

    async def start(self) -> PluginSpec:
        """Start the first; PluginError if the plugin cannot be used."""
        self._link = SupervisorLink(self._hello, self._log)
        spec = await self._link.start(self._load_timeout_s, on_exited=self._events.exited, on_lost=self._on_lost)
        self._serving_since = time.monotonic()
        self._events.serving(spec)
        return spec

    def worker_came(self) -> None:
        """Note that a worker can take calls: what was lost before does not count any more."""
        self._losses = 0

    async def stop(self) -> None:
        """End it and everything below it."""
        self._stopping = True
        if self._link is not None:
            await self._link.stop()
        if self._restarting is not None:
            await self._restarting

    def _on_lost(self) -> None:
        if self._stopping:
            return
        lost, self._link = self._link, None
        _logger.warning("the supervisor of the tool workers is gone; starting another")
        if time.monotonic() - self._serving_since > _STABLE_S:
            self._losses = 0
        self._events.lost()
        self._restarting = asyncio.get_running_loop().create_task(self._restart(lost))

    async def _restart(self, lost: SupervisorLink | None) -> None:
        if lost is not None:
            await lost.stop()
        while not self._stopping:
            self._losses += 1
            try:
                await self.start()
                return
            except (PluginError, ToolExecutorError) as error:
                killed = self._link is not None and self._link.was_killed
                if not killed or self._losses >= _MAX_LOSSES:
                    self._events.given_up(f"the tool workers could not be started again: {error}")
                    return
