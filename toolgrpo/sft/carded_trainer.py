"""TRL's trainer of supervised training, with our model card in place of TRL's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress
from trl import SFTTrainer

from toolgrpo.observe.progress import bar_columns
from toolgrpo.trainer.model_card import ModelCard, SavesWithCard

# What a person sees of supervised training: a bar on a terminal, a line now and then elsewhere.

_LINES = 5  # of a whole run, where there is no terminal
_SILENT_S = 20.0  # at most, as far as the steps allow
_TOO_SOON_S = 5.0  # for a line of a fifth, after one that broke a silence


class StepProgress:
    """Used as a context; `step(index, loss)` after each training step."""

    def __init__(
        self, console: Console, label: str, steps: int, clock: Callable[[], float] = time.monotonic, *, done: int = 0
    ) -> None:
        self._label = label
        self._done_before = done
        self._console = console
        self._steps = steps
        self._clock = clock
        self._started = self._spoken = clock()
        self._spoke_of_time = False  # the last line broke a silence, and was no fifth
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(*bar_columns(), console=console, transient=True)
            self._task = self._bar.add_task(label, total=steps, completed=done, note="")

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def step(self, index: int, loss: float) -> None:
        done = index + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=f"loss {loss:.3f}")
            return
        silent_s = self._clock() - self._spoken
        is_fifth = done % max(1, self._steps // _LINES) == 0
        is_told_anyhow = not self._spoke_of_time or silent_s >= _TOO_SOON_S or done == self._steps
        if silent_s >= _SILENT_S or (is_fifth and is_told_anyhow):
            self._spoke_of_time = not is_fifth
            self._spoken = self._clock()
            seconds = self._spoken - self._started
            left = seconds / (done - self._done_before) * (self._steps - done)
            self._console.print(
                f"{self._label}: step {done} of {self._steps}, loss {loss:.3f}, {seconds:.0f} s"
                + (f", about {left:.0f} s left" if done < self._steps else ""),
                highlight=False,
            )

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class CardedSFTTrainer(SavesWithCard, SFTTrainer):  # type: ignore[misc]  # TRL ships no types
    """Writes `card`, and `tools.json` where there are tools, beside each model that it saves."""

    def __init__(self, *, card: ModelCard, **arguments: Any) -> None:
        self.card = card
        super().__init__(**arguments)
