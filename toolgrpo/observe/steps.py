"""Write `steps.jsonl` (docs/reference/episodes.md): metrics and times of each step, measurements on held-out
rows, and events.

The main process writes; the lines before the training begins (the measurement before it) are kept
until it does, for only then is it known whether this is a new run. Before recordings come to
gigabytes a person is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerState, TrainingArguments

from toolgrpo.observe.console import LOGGERS, WarningLines, are_shown, show_warnings
from toolgrpo.observe.line_file import LineFile, json_line
from toolgrpo.observe.records import SCHEMA
from toolgrpo.observe.trackers import versions
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.rollout.observers import Observer, RolloutBegan, RolloutEnded
from toolgrpo.support.plain_text import without_secrets

_REMEDY = "Free some space and resume with resume_from_checkpoint auto."
_STEPS_BEFORE_WARNING = 3
_WARN_FROM_BYTES = 1e9


class StepLog(Observer, TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """The log of one process; without a path it writes nothing.

    `facts` are what the first line says of the run besides its config. `recorded_bytes` is how much
    was recorded so far, and `say` tells a person when that will be much. Whoever logs shows the package's warnings too, unless
    somebody `shows_warnings` already.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        facts: Mapping[str, Any],
        recorded_bytes: Callable[[], int] = lambda: 0,
        say: Callable[[str], None] = lambda text: None,
        shows_warnings: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = None if path is None else LineFile(path, what="the steps", remedy=_REMEDY)
        self._facts = facts
        self._recorded_bytes = recorded_bytes
        self._say = say
        self._clock = clock
        self._waiting: list[str] | None = []  # lines from before the training; None: it has begun
        self._label = ""
        self._phases = _Phases(clock)
        self._began = (0.0, 0, 0)  # clock, bytes and steps done when this training began
        self._warned = False
        self._handler = WarningLines(lambda text: self.event("warning", text[:2000], step=self.step))
        self._shown: logging.Handler | None = None
        if self._file is not None:
            # With a handler of ours Python's handler of last resort is silent, so a person must be told here.
            self._shown = None if shows_warnings or are_shown(LOGGERS[0]) else show_warnings(say)
            for logger in LOGGERS:
                logger.addHandler(self._handler)

    def event(self, what: str, text: str, *, step: int, **brought: Any) -> None:
        """Record an event: a warning, a finding, a checkpoint."""
        self._write("event", step=step, what=what, text=text, **brought)

    @property
    def step(self) -> int:
        """Return the number of steps done before the current one."""
        return self._phases.step

    # what observers hear

    def rollout_began(self, event: RolloutBegan) -> None:
        self._label = event.label
        if event.mode == "train":
            self._phases.begin("rollout")

    def rollout_ended(self, event: RolloutEnded) -> None:
        if event.rollout.mode == "train":
            self._phases.begin("scoring")

    def batch_done(self, batch: RolloutBatch) -> None:
        if batch.mode == "train":
            self._phases.begin("training")
        else:  # of all processes; an episode that could not be scored is no failure
            own = [(total, bool(one.success)) for one in batch.scored if (total := one.total) is not None]
            scored: list[tuple[float, bool]] = gather_object(own)
            asked: list[int] = gather_object([sum(any(one.drop is None for one in group) for group in batch.groups())])
            if scored:
                self._write(
                    "measured",
                    step=batch.step,
                    label=self._label,
                    n=len(scored),
                    questions=sum(asked),
                    successes=sum(success for _, success in scored),
                    reward=round(sum(total for total, _ in scored) / len(scored), 6),
                )

    def close(self) -> None:
        for handler in (self._handler, self._shown):
            if handler is not None:
                for logger in LOGGERS:
                    logger.removeHandler(handler)
        if self._file is not None and self._waiting is None:
            self._file.close()

    # what callbacks hear

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        resumed = state.global_step or None
        self._phases.step = state.global_step
        self._began = (self._clock(), self._recorded_bytes(), state.global_step)
        trained_before = self._waiting is None
        waiting, self._waiting = self._waiting or [], None
        if self._file is None:
            return
        if resumed is None:
            if trained_before:
                self._file.close()
            self._file.start_anew()
        self._write(
            "run",
            schema=SCHEMA,
            **self._facts,
            max_steps=state.max_steps,
            resumed=resumed,
            versions=versions(),
            config=set_fields(args),
        )
        self._file.write(waiting)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._phases.step = state.global_step
        self._phases.begin("before_rollout")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._phases.end_step()
        self._warn_of_size(args, state)

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float] | None = None, **kwargs: object
    ) -> None:
        logs = logs or {}
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        step = max(0, state.global_step - 1)
        if any(name.startswith("eval_") for name in numbers):
            self._write("eval", step=step, metrics=numbers)
        elif "train_runtime" not in numbers:
            self._write("step", step=step, metrics=numbers, phases=self._phases.taken())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self.event("checkpoint", f"checkpoint-{state.global_step}", step=max(0, state.global_step - 1))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        done = state.global_step >= state.max_steps
        text = f"after {state.global_step} of {state.max_steps} steps"
        self.event("finished" if done else "stopped", text, step=max(0, state.global_step - 1))

    def _write(self, kind: str, **values: Any) -> None:
        if self._file is None:
            return
        text = json_line({"kind": kind, "time": round(time.time(), 3), **values})
        if self._waiting is not None:
            self._waiting.append(text)
        else:
            self._file.write([text])

    def _warn_of_size(self, args: TrainingArguments, state: TrainerState) -> None:
        began_s, bytes_before, steps_before = self._began
        steps = state.global_step - steps_before
        if self._warned or steps < _STEPS_BEFORE_WARNING:
            return
        self._warned = True
        warning = size_warning(
            (self._recorded_bytes() - bytes_before) * max(1, args.world_size),
            seconds=self._clock() - began_s,
            steps=steps,
            all_steps=state.max_steps - steps_before,
        )
        if warning is not None:
            self._say(warning)


class _Phases:
    """Measure the time that each phase of a step takes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._steps = 0
        self._phase: str | None = None
        self._since = 0.0
        self.step = 0

    def begin(self, phase: str) -> None:
        self._close()
        self._phase = phase

    def end_step(self) -> None:
        self._close()
        self._phase = None
        self._steps += 1

    def taken(self) -> dict[str, float]:
        """Return the mean seconds of the phases since this was asked last."""
        taken = {name: round(seconds / max(1, self._steps), 4) for name, seconds in self._seconds.items()}
        self._seconds, self._steps = {}, 0
        return taken

    def _close(self) -> None:
        now = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now


def size_warning(n_bytes: int, *, seconds: float, steps: int, all_steps: int) -> str | None:
    """Return a warning if the recording of the whole run will take a gigabyte or more."""
    whole = n_bytes / max(1, steps) * all_steps
    if whole < _WARN_FROM_BYTES:
        return None
    a_day = n_bytes / max(seconds, 1e-9) * 86400
    return (
        f"recording {a_day / 1e9:.1f} GB a day, {whole / 1e9:.1f} GB in all {all_steps} steps (about a sixth of that "
        f"on disk, because full files are gzipped); record_episodes 0.1 keeps a tenth"
    )


def set_fields(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings that are not the defaults, without secrets."""
    changed: dict[str, Any] = {}
    for known in fields(args):
        default = known.default_factory() if known.default_factory is not MISSING else known.default
        value = getattr(args, known.name, None)
        said = isinstance(value, bool | int | float | str) or (isinstance(value, list) and value)
        if known.init and said and value != default:
            changed[known.name] = value
    kept: dict[str, Any] = without_secrets(changed)
    return kept
