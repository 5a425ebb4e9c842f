"""SIGTERM and Ctrl-C end a training run well:
the current step is finished and saved, then `train` returns.

The first signal only sets a flag. The processes of a run agree on it at the end of every step (one
number is gathered), so all of them stop after the same step, whichever was signalled. A signal in
the last step is remembered too: whoever called `train` knows that nothing long is to follow. After
the first signal the system's own handling is put back, so that a second signal ends the process at
once, even inside a native call. In a notebook or at Python's prompt a second Ctrl-C is a
`KeyboardInterrupt` instead: it ends the cell, and what the session holds is kept.

Not covered: a launcher that kills what it started (torchrun forwards a signal, and kills after 30
s: docs/how-to/scaling.md).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def finish_before_stopping(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Do the block to its end, and only then what a signal asks for.

    A second one ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _let_the_next_end_it()
        say(f"{signal.Signals(number).name}: {what} first; a second signal ends the run at once")

    handlers = {number: signal.signal(number, receive) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            os.kill(os.getpid(), received[0])


def _let_the_next_end_it() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler if _in_a_session() else signal.SIG_DFL)


def _in_a_session() -> bool:
    """Return whether somebody types here, at a prompt or in a notebook, rather than runs a script."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


class GracefulStop(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """A context manager around `train`, and the callback that ends it.

    `stopped_by` is the signal that asked for it, or None.
    """

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
        if number:
            self.stopped_by = signal.Signals(number)
            control.should_save = control.should_save or state.global_step < state.max_steps
            control.should_training_stop = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        _let_the_next_end_it()
        self._say(
            f"{self._received.name}: the current step is finished and saved first; a second signal ends the run at once"
        )
