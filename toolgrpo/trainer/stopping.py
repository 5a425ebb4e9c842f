"""SIGTERM and Ctrl-C end a training run well: the step of now is finished and saved, then `train` returns.

The first signal only sets a flag. The processes of a run agree on it at the end of every step (one number is gathered),
so all of them stop after the same step, whichever was signalled. After the first signal the system's own handling is
put back, so that a second signal ends the process at once, even inside a native call.

Not covered: a launcher that kills what it started (torchrun forwards a signal, and kills after 30 s: docs/scaling.md).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["GracefulStop"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """A context manager around `train`, and the callback that ends it. `stopped_by` is the signal that did, or None."""

    def __init__(self, accelerator: Any, say: Callable[[str], None]) -> None:
        self._accelerator = accelerator
        self._say = say
        self._received: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self.stopped_by: signal.Signals | None = None

    def __enter__(self) -> GracefulStop:
        self._received = self.stopped_by = None
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._handlers = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        received = torch.tensor([int(self._received or 0)], device=self._accelerator.device)
        number = int(self._accelerator.gather(received).max())
        if number and state.global_step < state.max_steps:
            self.stopped_by = signal.Signals(number)
            control.should_save = True
            control.should_training_stop = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        for one in self._handlers:
            signal.signal(one, signal.SIG_DFL)
        self._say(
            f"{self._received.name}: the step of now is finished and saved first; a second signal ends the run at once"
        )
