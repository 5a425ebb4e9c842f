"""The cores of one processor, on which a training and an engine of its process compute side by side.

The threads of one parallel operation wait for each other. With more of them than cores, each waits
for one that is not running: two cores then do less than with one thread for each. So while both
compute, each gets half of the threads; whoever computes alone gets all. Only the thread that computes
can say how many it uses: the engine's is told on its own event loop, and the training's looks, before
every linear layer of its passes, forward and backward, whether the engine has work.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

_SWITCH_S = 0.0005  # after which Python lets another thread go on; a tenth of its default


class SharedCores:
    """Whose the threads are, until `give_back`; told by the training's thread.

    `engine_has_work` says whether the engine computes now, and `trained` is the model whose passes run
    beside it.
    """

    def __init__(
        self, engine_loop: asyncio.AbstractEventLoop, engine_has_work: Callable[[], bool], trained: torch.nn.Module
    ) -> None:
        self._loop = engine_loop
        self._engine_has_work = engine_has_work
        self._all = torch.get_num_threads()
        self._beside = False  # a pass runs, and the engine may have work
        self._thread = threading.get_ident()
        linear = (module for module in trained.modules() if isinstance(module, torch.nn.Linear))
        self._hooks = [module.register_forward_pre_hook(self._at_layer) for module in linear]
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._switch_s))

    def engine_alone(self) -> None:
        """The training waits for the engine from here on."""
        self._beside = False
        self._engine_takes(self._all)

    def both(self) -> None:
        """A pass begins, and the engine may have work, too."""
        self._beside = True
        self._engine_takes(max(1, self._all // 2))
        self._divide()

    def training_alone(self) -> None:
        """The engine has nothing to do from here on."""
        self._beside = False
        torch.set_num_threads(self._all)

    def give_back(self) -> None:
        """Everything is as it was before."""
        self.training_alone()
        for hook in self._hooks:
            hook.remove()
        sys.setswitchinterval(self._switch_s)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCores:
        return self  # whoever copies the model copies its hooks

    def _at_layer(self, layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._beside:
            return
        self._divide()
        for one in inputs:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(self._at_gradient)  # type: ignore[no-untyped-call]  # untyped in torch

    def _at_gradient(self, gradient: torch.Tensor) -> None:
        if self._beside:
            self._divide()

    def _divide(self) -> None:
        """Give this thread what it may have now."""
        if threading.get_ident() != self._thread:
            return  # somebody else's pass
        mine = self._all - self._all // 2 if self._engine_has_work() else self._all
        if torch.get_num_threads() != mine:
            torch.set_num_threads(mine)

    def _engine_takes(self, n_threads: int) -> None:
        self._loop.call_soon_threadsafe(_take, n_threads)


def _take(n_threads: int) -> None:
    """Give this thread so many; one that has computed nothing yet would take the last number set, by whomever."""
    torch.get_num_threads()  # that is settled here
    torch.set_num_threads(n_threads)
