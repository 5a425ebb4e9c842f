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

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from toolgrpo.errors import PeerError, ToolGRPOError
from toolgrpo.support.storage import write_whole

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

    handlers = {number: signal.signal(number, receive) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            os.kill(os.getpid(), received[0])


def _heeded() -> list[signal.Signals]:
    """Return the signals that ask to stop, without those that whoever started this has it ignore."""
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _let_the_next_end_it() -> None:
    in_a_session = hasattr(sys, "ps1") or "ipykernel" in sys.modules  # somebody types here, and runs no script
    for number in _heeded():
        interrupts = number == signal.SIGINT and in_a_session
        signal.signal(number, signal.default_int_handler if interrupts else signal.SIG_DFL)


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
            self._handlers = {number: signal.signal(number, self._receive) for number in _heeded()}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        received = torch.tensor([int(self._received or 0)], device=self._accelerator.device)
        number = int(self._accelerator.gather(received).max())
        if number:
            self.stopped_by = signal.Signals(number)
            control.should_save = control.should_save or state.global_step < state.max_steps
            control.should_training_stop = True

    def on_epoch_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave alone what was just saved: Transformers takes a stop in the middle of an epoch for its end."""
        saved = self.stopped_by is not None and state.global_step < state.max_steps
        if saved and abs((state.epoch or 0) - round(state.epoch or 0)) > 1e-6:
            control.should_save = control.should_evaluate = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        _let_the_next_end_it()
        self._say(
            f"{self._received.name}: the current step is finished and saved first; a second signal ends the run at once"
        )


class RunIsComplete(Exception):
    """Raised when training begins and nothing is left to train: Transformers would train a step more."""


class HeldOutWatch(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Save each step that is the best so far, and end a training as `stop_when` says, by its evaluations.

    They stand in the state that a checkpoint keeps, so a resumed run goes by all of them. Several data sets
    (`n_datasets`) are evaluated one after another and count by their mean.
    """

    def __init__(
        self, *, keeps_best: bool, stop_when: str | None, say: Callable[[str], None], n_datasets: int = 1
    ) -> None:
        self._keeps_best = keeps_best
        self._stop_when = stop_when
        self._say = say
        self._n_datasets = n_datasets

    def reason(self, state: TrainerState) -> str | None:
        """Return why the training is to end, if it is."""
        rates = _rates(state)
        if not rates or self._stop_when is None:
            return None
        if self._stop_when == "solved":
            return "held-out success is 1" if rates[-1] >= 1 else None
        most, best = int(self._stop_when.partition(":")[2]), max(rates)
        since = len(rates) - 1 - rates.index(best)
        return f"held-out success has not risen for {since} evaluations (best: {best:.3f})" if since >= most else None

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        of_this_step = [log for log in _evaluations(state) if log["step"] == state.global_step]
        measured = [one for one in of_this_step if is_measured(one["eval_success"])]
        if len(of_this_step) < self._n_datasets or len(measured) < len(of_this_step):
            return
        best = -1.0 if state.best_metric is None else float(state.best_metric)
        if self._keeps_best and state.global_step and _rates(state)[-1] > best:
            control.should_save = True  # Transformers notes it as the best, and loads it at the end
        reason = self.reason(state)
        if reason is not None and state.global_step:  # a training that ends before its first step ends otherwise
            control.should_save = control.should_training_stop = True
            self._say(f"stopped after step {state.global_step}: {reason} (stop_when {self._stop_when})")


def _rates(state: TrainerState) -> list[float]:
    """Return held-out success by evaluation, over the data sets of each; one that could not be measured is none."""
    steps = [[log["eval_success"] for log in logs] for _, logs in groupby(_evaluations(state), key=itemgetter("step"))]
    return [fmean(rates) for rates in steps if all(map(is_measured, rates))]


def _evaluations(state: TrainerState) -> list[dict[str, Any]]:
    return [log for log in state.log_history if "eval_success" in log]


def is_measured(rate: float | None) -> bool:
    """Return whether an evaluation has scored episodes; TRL's log has None for what is not a number."""
    return rate is not None and not math.isnan(rate)


# When one process of a run fails, the others say so, instead of showing what it did to them.
#
# The process that fails first leaves a note in the output folder. The others then fail inside a
# collective call, because it is gone; each looks for the note and raises `PeerError`, which names the
# process and its error. The launcher ends whoever is left. Nobody waits for a time-out.
#
# Not covered: machines that do not share the output folder; there the others show the error of the
# collective call.

_NOTE_S = 5.0  # a note is written before its process goes, so it is there almost at once


@contextmanager
def report_first_failure(output_dir: Path, accelerator: Any) -> Iterator[None]:
    """Run the collective part of a run; if it fails, say which process failed first."""
    if accelerator.num_processes == 1:
        yield
        return
    note = output_dir / "failure.json"
    if accelerator.is_main_process:
        note.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    try:
        yield
    except Exception as error:
        if not _lost_a_peer(error):
            _leave(note, accelerator.process_index, error)
            raise
        first = _wait_for(note)
        if first is None or first["process"] == accelerator.process_index:
            raise
        raise PeerError(
            f"process {first['process']} failed first, so this one cannot continue: {first['error']}"
        ) from error


def _lost_a_peer(error: BaseException) -> bool:
    """Return whether a collective call failed, as it does in every process but the one to blame."""
    if isinstance(error, ToolGRPOError):
        return False
    distributed = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    )
    return distributed or (error.__cause__ is not None and _lost_a_peer(error.__cause__))


def _leave(note: Path, process: int, error: Exception) -> None:
    written = note.with_suffix(f".{process}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(written, json.dumps({"process": process, "error": f"{type(error).__name__}: {error}"}))
        if not note.exists():
            written.replace(note)
    except OSError:
        return  # the error itself matters more than the note
    finally:
        written.unlink(missing_ok=True)


def _wait_for(note: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + _NOTE_S
    while time.monotonic() < deadline:
        if note.exists():
            content: dict[str, Any] = json.loads(note.read_text())
            return content
        time.sleep(0.1)
    return None


# A trainer gives its engine and tool workers back by itself when nobody has it any more.
#
# In a notebook a cell is run again: the new trainer is made while the old one still has its name, and
# the old one goes when the name is bound anew. A trainer and its callbacks know each other, so it is
# Python's garbage collection that finds it, in whichever thread that runs; closing waits for tool
# workers, so it is done in the main thread or in one of its own.


class Closable(Protocol):
    def close(self) -> None: ...


def close_when_nobody_has_it(trainer: Closable) -> None:
    """Close it now; called from `__del__`."""
    if sys.is_finalizing():
        return
    if threading.current_thread() is threading.main_thread():
        trainer.close()
    else:
        threading.Thread(target=trainer.close, name="toolgrpo-closing", daemon=True).start()
