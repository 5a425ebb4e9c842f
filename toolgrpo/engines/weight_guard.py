"""Whether a server still holds the trained weights, asked when it may be another one than before.

A question that failed is put again until the server has answered, whatever connection is used then.
While weights are pushed nobody asks and nobody restores: both sides take the server's lock.
"""

from __future__ import annotations

import asyncio
import threading
import time

from toolgrpo.engines.http_exchange import without_waiting
from toolgrpo.engines.server_weights import ServerWeights
from toolgrpo.engines.vllm_http import ServerControl
from toolgrpo.errors import EngineError, FinalEngineError


class Lost(Exception):
    """One attempt failed in a way that another attempt may mend."""


class WeightGuard:
    """Knows whether one server still holds the trained weights,
    and gives them back when it does not.
    """

    def __init__(self, server: ServerControl, weights: ServerWeights | None, weight_lock: threading.Lock) -> None:
        self._server = server
        self._weights = weights
        self._weight_lock = weight_lock
        self._check_since_s = 0.0
        self._held_at_s = -1.0
        self._lock = asyncio.Lock()
        self.restores = 0

    def check_again(self) -> None:
        """Let the next `ensure` ask the server again: it may be another one than before."""
        self._check_since_s = time.monotonic()

    def note_restart(self) -> None:
        """Count a server that lost its weights as restored; the caller has its lock, and new ones."""
        if self._weights is not None and not self._weights.holds(self._server):
            self.restores += 1

    async def ensure(self) -> None:
        """Ask the server, unless it was asked after the last `check_again`.

        Raises `Lost` if it cannot be reached, and `FinalEngineError` if nothing can be given back.
        """
        if self._weights is None or self._held_at_s > self._check_since_s:
            return
        async with self._lock:
            if self._held_at_s > self._check_since_s:
                return
            asked_s = time.monotonic()
            try:
                if not await without_waiting(self._held, self._weights):
                    self.restores += 1
            except FinalEngineError:
                raise
            except EngineError as error:
                raise Lost(str(error)) from error
            self._held_at_s = asked_s

    def _held(self, weights: ServerWeights) -> bool:
        """Return whether the server held the weights; if not, it does now."""
        with self._weight_lock:
            held = weights.holds(self._server)
            if not held:
                weights.restore(self._server)
            return held
