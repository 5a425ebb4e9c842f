"""The cores of one processor, on which a training and an engine of its process compute side by side.

The threads of one parallel operation wait for each other. With more of them than cores, each waits
for one that is not running: two cores then do less than with one thread for each. So while both
compute, each gets half of the threads; whoever computes alone gets all. Only the thread that computes
can say how many it uses, so that the engine's is told on its own event loop.

A training gives its half away only where the engine was busy for most of its last pass: a pass whose
engine has nothing to do meanwhile would lose more than it gains.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import torch

__all__ = ["SharedCores"]

_MOST = 0.6  # of a pass
_SWITCH_S = 0.0005  # after which Python lets another thread go on; a tenth of its default


class SharedCores:
    """Whose the threads are, until `give_back`; told by the training's thread.

    `engine_busy_s` says for how long the engine has had work so far.
    """

    def __init__(
        self,
        engine_loop: asyncio.AbstractEventLoop,
        engine_busy_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = engine_loop
        self._busy_s = engine_busy_s
        self._clock = clock
        self._all = torch.get_num_threads()
        self._halves = True
        self._pass: tuple[float, float] | None = None  # when it began, and for how long the engine had been busy
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._switch_s))

    def engine_alone(self) -> None:
        """The training waits for the engine from here on."""
        if self._pass is not None:
            began_s, busy_s = self._pass
            self._halves = self._busy_s() - busy_s >= _MOST * (self._clock() - began_s)
            self._pass = None
        self._engine_takes(self._all)

    def both(self) -> None:
        """A pass begins, and the engine has work, too."""
        half = self._all // 2
        self._engine_takes(max(1, half))
        torch.set_num_threads(max(1, self._all - half) if self._halves else self._all)
        self._pass = self._clock(), self._busy_s()

    def training_alone(self) -> None:
        """The engine has nothing to do from here on."""
        self._pass = None
        torch.set_num_threads(self._all)

    def give_back(self) -> None:
        """Everything is as it was before."""
        self.training_alone()
        sys.setswitchinterval(self._switch_s)

    def _engine_takes(self, n_threads: int) -> None:
        self._loop.call_soon_threadsafe(_take, n_threads)


def _take(n_threads: int) -> None:
    """Give this thread so many; one that has computed nothing yet would take the last number set, by whomever."""
    torch.get_num_threads()  # that is settled here
    torch.set_num_threads(n_threads)
