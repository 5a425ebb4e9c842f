"""Display of supervised training: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import Progress
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.observe.progress import bar_columns

_LINES = 5  # of a whole run, where there is no terminal
_SILENT_S = 20.0  # at most, as far as the steps allow
_TOO_SOON_S = 5.0  # for a line of a fifth, after one that broke a silence


class StepProgress(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Display of a training by TRL's trainer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(*bar_columns(), console=console, transient=True) if console.is_terminal else None
        self._spoke_of_time = False  # the last line broke a silence, and was no fifth

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._done_before = state.global_step
        self._started = self._spoken = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task("sft", total=state.max_steps, completed=state.global_step, note="")
            self._bar.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs and "loss" in logs:
            self._step(state.global_step, state.max_steps, logs["loss"])

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _step(self, done: int, steps: int, loss: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=f"loss {loss:.3f}")
            return
        silent_s = time.monotonic() - self._spoken
        is_fifth = done % max(1, steps // _LINES) == 0
        is_told_anyhow = not self._spoke_of_time or silent_s >= _TOO_SOON_S or done == steps
        if silent_s >= _SILENT_S or (is_fifth and is_told_anyhow):
            self._spoke_of_time = not is_fifth
            self._spoken = time.monotonic()
            seconds = self._spoken - self._started
            left = seconds / (done - self._done_before) * (steps - done)
            self.say(
                f"sft: step {done} of {steps}, loss {loss:.3f}, {seconds:.0f} s"
                + (f", about {left:.0f} s left" if done < steps else "")
            )
