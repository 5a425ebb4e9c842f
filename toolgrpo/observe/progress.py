"""One progress display: the training steps with reward, success and time left,
and under it the current rollout.

On a terminal it is a live bar. Elsewhere (a pipe, a CI log) it is one line for about every
twentieth of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.plain_text import plain
from toolgrpo.rollout.observers import EpisodeDone, Observer, RolloutBegan, RolloutEnded

__all__ = ["RunProgress", "StepsCallback"]

_LINES_PER_RUN = 20
_ROLLOUT_SHOWN_AFTER_S = 2.0


class RunProgress(Observer):
    """The progress display of one process. A quiet console shows nothing.

    The bar over the episodes of a rollout appears only if the rollout takes a while, and goes away
    with it.

    With a `say` of its own (a `Terminal`'s), lines above the bars go there, and what libraries
    print goes to the log.
    """

    def __init__(self, console: Console, say: Callable[[str], None] | None = None) -> None:
        self._console = console
        self._say = say
        self._live = console.is_terminal and not console.quiet
        self._progress: Progress | None = None
        self._steps: TaskID | None = None
        self._next_line = 0
        self._started = time.monotonic()
        self._episodes: TaskID | None = None
        self._episodes_done = 0
        self._rollout_began = 0.0

    @property
    def lines_only(self) -> bool:
        """Whether there is no terminal for bars: what is shown goes into a pipe or a file."""
        return not self._console.is_terminal and not self._console.quiet

    def start_steps(self, total: int, done: int = 0) -> None:
        self._started = time.monotonic()
        self._steps = self._display().add_task("training", total=total, completed=done, note="")
        self._next_line = done

    def show_step(self, done: int, total: int, note: str) -> None:
        if self._live and self._steps is not None:
            self._display().update(self._steps, completed=done, note=note)
        elif done >= self._next_line or done == total:
            self._next_line = done + max(1, total // _LINES_PER_RUN)
            seconds = time.monotonic() - self._started
            self._console.print(f"step {done}/{total}  {note}  {seconds:.0f} s", markup=False)

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        if self._say is not None:
            self._say(text)
        else:
            self._console.print(plain(text), markup=False)

    def stop_steps(self) -> None:
        self._steps = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def rollout_began(self, event: RolloutBegan) -> None:
        self._rollout_began, self._episodes_done = time.monotonic(), 0

    def episode_done(self, event: EpisodeDone) -> None:
        self._episodes_done += 1
        if not self._live or time.monotonic() - self._rollout_began < _ROLLOUT_SHOWN_AFTER_S:
            return
        if self._episodes is None:
            rollout = event.rollout
            self._episodes = self._display().add_task(rollout.label, total=rollout.n_episodes, note="")
        total = max(event.rollout.n_episodes, self._episodes_done)  # more may be drawn than it began with
        self._display().update(self._episodes, completed=self._episodes_done, total=total)

    def rollout_ended(self, event: RolloutEnded) -> None:
        if self._episodes is not None:
            self._display().remove_task(self._episodes)
            self._episodes = None
        if self._steps is None:
            self.stop_steps()

    def close(self) -> None:
        self.stop_steps()

    def _display(self) -> Progress:
        if self._progress is None:
            columns: list[ProgressColumn] = [
                TextColumn("{task.description:>9}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            ]
            others_above = self._say is None
            self._progress = Progress(
                *columns,
                console=self._console,
                disable=not self._live,
                redirect_stdout=others_above,
                redirect_stderr=others_above,
            )
            self._progress.start()
        return self._progress


class StepsCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Feeds a `RunProgress` from the trainer's own log."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._progress.start_steps(state.max_steps, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        logs = logs or {}
        shown = [f"{name} {logs[name]:.2f}" for name in ("reward", "success") if logs.get(name) is not None]
        if shown:
            self._progress.show_step(state.global_step, state.max_steps, "  ".join(shown))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._progress.stop_steps()
