"""The display of a training: one line per log, and on a terminal one live bar under them.

The bar says how many steps are done, what runs at the moment, and how long it will take; outside of
a training (held-out questions, an evaluation) it counts episodes, and goes away with them. In a pipe
or a CI log the lines stand alone. A training from Python shows what one from the command line shows,
and nothing of the displays that Transformers brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import transformers
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
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging as transformers_logging

from toolgrpo.rollout.observers import EpisodeDone, Observer, RolloutBegan, RolloutEnded
from toolgrpo.support.plain_text import counted, plain

_TITLES_EVERY = 25  # lines
_LINES = 5  # of a whole supervised training, where there is no terminal
_SILENT_S = 20.0  # at most, as far as the steps allow
_TOO_SOON_S = 5.0  # for a line of a fifth, after one that broke a silence


Log = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the lines: its title and width, and the metric that it shows in which form."""

    title: str
    width: int
    metric: str
    form: str = ".2f"
    rank: int = 0  # the highest goes first where there is no room

    def text(self, log: Log) -> str:
        value = log.get(self.metric)
        if value is None:
            return "-"
        form = (".2f" if value < 100 else ".0f") if self.form == "seconds" else self.form
        return format(value, form)


_LIVE, _WHOLE, _ROLLOUT, _TRAINING = "live", "seconds/step", "seconds/rollout", "seconds/training"
_COLUMNS = (
    _Column("reward", 6, "reward"),
    _Column("std", 4, "reward_std", rank=3),
    _Column("success", 7, "success"),
    _Column("live", 4, _LIVE, ".0%"),
    _Column("turns", 5, "rollout/turns", ".1f", 4),
    _Column("calls", 5, "tools/call_frequency", ".1f"),
    _Column("failed", 6, "tools/failure_frequency", ".0%"),
    _Column("length", 6, "completions/mean_length", ".0f", 2),
    _Column("entropy", 7, "entropy", ".2f", 5),
    _Column("engine+-", 8, "sampling/sampling_logp_difference/mean", ".1e", 6),
    _Column("s/step", 6, _WHOLE, "seconds", 1),
    _Column("rollout", 7, _ROLLOUT, "seconds", 7),
    _Column("training", 8, _TRAINING, "seconds", 8),
)


class StepLines:
    """One aligned line per log of a training of `total` steps, and the titles above the columns.

    A column without its metric shows a dash. For a terminal so wide (None: any) the columns that
    say least are left out, so that a line is a line.
    """

    def __init__(self, total: int, width: int | None = None) -> None:
        self._total = total
        self._first = max(4, 2 * len(str(total)) + 1)
        columns = list(_COLUMNS)
        while width is not None and self._first + sum(c.width + 1 for c in columns) >= width:
            least = max(columns, key=lambda column: column.rank)
            if least.rank == 0:
                break
            columns.remove(least)
        self._columns = columns

    def titles(self) -> str:
        return self._joined("step", [column.title for column in self._columns])

    def line(self, step: int, log: Log) -> str:
        """Return the line; of live groups the share among those that were drawn, where dead ones are replaced."""
        dead = log.get("reward/groups_without_spread")
        live = log.get("sampling/live_rate", None if dead is None else 1 - dead)
        known = log if live is None else {**log, _LIVE: live}
        return self._joined(f"{step}/{self._total}", [column.text(known) for column in self._columns])

    def _joined(self, first: str, texts: Sequence[str]) -> str:
        padded = [text.rjust(column.width) for text, column in zip(texts, self._columns, strict=True)]
        return " ".join([first.rjust(self._first), *padded])


def bar_columns() -> list[ProgressColumn]:
    """Return the columns of a bar: steps, seconds, time left, and a task's `note`."""
    return [
        TextColumn("{task.description:>9}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]


class RunProgress(Observer, TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """The display of one process. A quiet console shows nothing.

    With a `say` of its own (a `Terminal`'s), lines go there too, and what libraries print goes to
    the log; else what is printed meanwhile stands above the bar.
    """

    def __init__(self, console: Console, say: Callable[[str], None] | None = None) -> None:
        self._console = console
        self._say = say
        self._live = console.is_terminal and not console.quiet
        self._progress: Progress | None = None
        self._steps: TaskID | None = None
        self._lines = StepLines(0)
        self._lines_shown = 0
        self._episodes: TaskID | None = None
        self._episodes_done = 0
        self._rollout_began = self._step_began = 0.0
        self._begin_times()

    @property
    def brings_own_log(self) -> bool:
        """Return whether the output of libraries goes to a log file."""
        return self._say is not None

    @property
    def lines_only(self) -> bool:
        """Return whether the output is a pipe or a file, in which no bar can be shown."""
        return not self._console.is_terminal and not self._console.quiet

    def start_steps(self, total: int, done: int = 0) -> None:
        self._lines = StepLines(total, self._console.width if self._live else None)
        self._lines_shown = 0
        self._steps = self._display().add_task("training", total=total, completed=done, note="")

    def show_step(self, step: int, log: Log) -> None:
        """Print the line of a step, repeating the titles every few lines."""
        if self._lines_shown % _TITLES_EVERY == 0:
            self.say(self._lines.titles())
        self._lines_shown += 1
        self.say(self._lines.line(step, log))

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        if self._say is not None:
            self._say(text)
        else:
            self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)

    def stop_steps(self) -> None:
        self._steps = self._episodes = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def rollout_began(self, event: RolloutBegan) -> None:
        self._rollout_began, self._episodes_done = time.monotonic(), 0
        self._note(f"episodes 0/{event.n_episodes}")
        if self._live and self._steps is None:
            self._episodes = self._display().add_task(event.label, total=event.n_episodes, note="")

    def episode_done(self, event: EpisodeDone) -> None:
        self._episodes_done += 1
        rollout = event.rollout
        if self._steps is not None:
            self._note(f"episodes {self._episodes_done}/{rollout.n_episodes}")
            return
        if self._episodes is None:
            return
        total = max(event.rollout.n_episodes, self._episodes_done)  # more may be drawn than it began with
        self._display().update(self._episodes, completed=self._episodes_done, total=total)

    def rollout_ended(self, event: RolloutEnded) -> None:
        if event.rollout.mode == "train":
            self._rollout_s += time.monotonic() - self._rollout_began
        if self._episodes is not None:
            self._display().remove_task(self._episodes)
            self._episodes = None
        if self._steps is None:
            self.stop_steps()
        else:
            self._note("training pass" if event.rollout.mode == "train" else "")

    def close(self) -> None:
        self.stop_steps()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        if not self.brings_own_log:
            self.say(training_line(args, state.max_steps, getattr(kwargs.get("train_dataloader"), "dataset", ())))
        self.start_steps(state.max_steps, state.global_step)
        self._begin_times()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._steps_s += time.monotonic() - self._step_began
        self._n_steps += 1
        if self._steps is not None:
            self._display().update(self._steps, completed=state.global_step, note="")

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: Log | None = None, **kwargs: object
    ) -> None:
        logs = logs or {}
        if "reward" in logs and self._n_steps:
            whole, rollout = self._steps_s / self._n_steps, self._rollout_s / self._n_steps
            seconds = {_WHOLE: whole, _ROLLOUT: rollout, _TRAINING: max(0.0, whole - rollout)}
            self.show_step(state.global_step, {**logs, **seconds})
            self._begin_times()
        elif logs.get("eval_reward") is not None:  # else nothing could be scored
            shown = [
                f"{name} {logs[key]:.2f}"
                for name, key in (("reward", "eval_reward"), ("success", "eval_success"))
                if logs.get(key) is not None
            ]
            named = next((key[5:-8] for key in logs if key.endswith("_runtime")), "")  # one of several data sets
            where = f" on {named}" if named else ""
            self.say(f"evaluated after step {state.global_step}{where}: {', '.join(shown)}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self.stop_steps()

    def _begin_times(self) -> None:
        """Begin to measure the seconds until the next log: of whole steps, and of rollouts to train on."""
        self._steps_s = self._rollout_s = 0.0
        self._n_steps = 0

    def _note(self, text: str) -> None:
        """Show beside the bar which phase is running."""
        if self._live and self._steps is not None:
            self._display().update(self._steps, note=text)

    def _display(self) -> Progress:
        if self._progress is None:
            others_above = not self.brings_own_log
            self._progress = Progress(
                *bar_columns(),
                console=self._console,
                disable=not self._live,
                redirect_stdout=others_above,
                redirect_stderr=others_above,
            )
            self._progress.start()
        return self._progress


class StepProgress(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """The display of supervised training: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(*bar_columns(), console=console, transient=True) if console.is_terminal else None
        self._spoke_of_time = False  # the last line broke a silence, and was no fifth

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._done_before = state.global_step
        self._started = self._spoken = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task("sft", total=state.max_steps, completed=state.global_step, note="")
            self._bar.start()

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: Log | None = None, **kwargs: object
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


def take_display(remove: Callable[[Any], object], given: Sequence[Any] = ()) -> None:
    """Remove from a trainer the callbacks that print Transformers' dictionaries and bars,
    but those that the user has given.
    """
    for kind in {PrinterCallback, ProgressCallback, transformers.trainer.DEFAULT_PROGRESS_CALLBACK}:
        if not any(one is kind or type(one) is kind for one in given):
            remove(kind)


@contextmanager
def library_bars_off() -> Iterator[None]:
    """Disable Transformers' progress bars inside the block."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def training_line(args: TrainingArguments, n_steps: int, rows: Any) -> str:
    """Return what a training on these rows is about to do."""
    n_rows = f"of {counted(len(rows), 'row')}" if hasattr(rows, "__len__") else "of rows without end"
    epochs = f"{args.num_train_epochs:g} epoch{'' if args.num_train_epochs == 1 else 's'} {n_rows}"
    drawn = epochs if args.max_steps <= 0 else n_rows
    default = next(one.default for one in fields(args) if one.name == "learning_rate")
    hint = " (TRL's default; LoRA recipes use 1e-5 to 1e-4)" if args.learning_rate == default else ""
    return f"training  {counted(n_steps, 'step')} ({drawn}), learning rate {args.learning_rate:g}{hint}"
