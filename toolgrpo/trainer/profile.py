"""`--profile`: where the time of a step goes, as a table at the end and in steps.jsonl.

`PLACES` names the functions that are timed, each with the part of the step that it belongs to. While
a run is profiled they are wrapped; what one of them calls counts for the inner part only, so that
the parts of a step add up to it. Without the flag nothing is wrapped and nothing is paid.

An engine that decodes on a thread of its own is waited for: its time comes out of the time in which
the rollout waits, and only what is left of that is waiting for tools and servers.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.rollout.observers import Observer

__all__ = ["PLACES", "Place", "ProfileOptions", "StepProfile", "profile_lines"]

REST = "everything else"
_ENGINE, _WAITING, _OPTIMIZER = "engine", "waiting for tools and servers", "optimizer"
_WARM_UP = 2  # steps at the start that are left out, where there are others


class Place(NamedTuple):
    """A method that is timed, and the part of a step that it is."""

    part: str
    module: str
    owner: str
    method: str


PLACES = (
    Place(_ENGINE, "toolgrpo.engines.decode_batch", "DecodeBatch", "step"),
    Place(_ENGINE, "toolgrpo.engines.vllm_seam", "StepEngine", "step"),
    Place(_WAITING, "selectors", "DefaultSelector", "select"),
    Place("chat format: prompts, bridges, calls", "toolgrpo.chat.format", "TemplateFormat", "prompt"),
    Place("chat format: prompts, bridges, calls", "toolgrpo.chat.format", "TemplateFormat", "bridge"),
    Place("chat format: prompts, bridges, calls", "toolgrpo.chat.format", "TemplateFormat", "parse"),
    Place("loop of the rollout", "toolgrpo.trainer.batch_in_training", "BatchInTraining", "generate"),
    Place("weights to the engine", "toolgrpo.trainer.trainer", "ToolGRPOTrainer", "_load_weights"),
    Place("rewards and the batch", "toolgrpo.trainer.batch_in_training", "BatchInTraining", "generate_and_score"),
    Place("recording", "toolgrpo.observe.recorder", "EpisodeRecorder", "batch_done"),
    Place("recording", "toolgrpo.observe.recorder", "EpisodeRecorder", "tokens_seen"),
    Place("training pass: forward", "toolgrpo.trainer.batch_in_training", "BatchInTraining", "score_tokens"),
    Place("training pass: loss", "toolgrpo.trainer.batch_in_training", "BatchInTraining", "compute_loss"),
    Place("training pass: backward", "accelerate", "Accelerator", "backward"),
)


@dataclass
class ProfileOptions:
    """The field of the config."""

    profile: bool = field(
        default=False,
        metadata={"help": "Time the parts of each step; print where the time went at the end (docs/watching.md)."},
    )


class _Spans:
    """Adds up, by part, the time of nested calls on one thread, each without what it called."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._open: list[float] = []  # the time that calls inside took, of each call that is open
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = defaultdict(float)
        self.elsewhere_s = 0.0  # of the engine, on its own thread

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return self._on_another(part, function, args, kwargs)
            if part == _WAITING and not self._open:
                return function(*args, **kwargs)
            began = self._clock()
            self._open.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                self.add(part, self._clock() - began, inside=self._open.pop())

        return call

    def add(self, part: str, took: float, *, inside: float = 0.0) -> None:
        """Count a call that took so long, `inside` of it in others that were counted."""
        self.seconds[part] += took - inside
        if self._open:
            self._open[-1] += took

    def _on_another(self, part: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if part != _ENGINE:
            return function(*args, **kwargs)
        began = self._clock()
        try:
            return function(*args, **kwargs)
        finally:
            with self._lock:
                self.elsewhere_s += self._clock() - began

    def take(self) -> dict[str, float]:
        """Return the seconds by part since this was asked last."""
        with self._lock:
            elsewhere, self.elsewhere_s = self.elsewhere_s, 0.0
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        waited = min(elsewhere, taken.get(_WAITING, 0.0))
        if waited:
            taken[_WAITING] -= waited
            taken[_ENGINE] = taken.get(_ENGINE, 0.0) + waited
        return taken


class StepProfile(Observer, TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Wraps the places while a training runs, and tells `done` the lines of the table at its end."""

    def __init__(
        self,
        done: Callable[[Sequence[str], dict[str, float]], None],
        *,
        places: Sequence[Place] = PLACES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._done, self._places, self._clock = done, places, clock
        self._wrapped = ExitStack()
        self._spans = _Spans(clock)
        self._began = self._optimizing = 0.0
        self._steps: list[dict[str, float]] = []  # each with its whole time under ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._wrapped.close()
        self._spans, self._steps = _Spans(self._clock), []
        for place in self._places:
            owner = getattr(importlib.import_module(place.module), place.owner)
            inner = owner.__dict__[place.method]
            setattr(owner, place.method, self._spans.timed(place.part, inner))
            self._wrapped.callback(setattr, owner, place.method, inner)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._spans.take()
        self._began = self._clock()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._optimizing = self._clock()  # the scheduler of the learning rate holds the optimizer's own `step`

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._spans.add(_OPTIMIZER, self._clock() - self._optimizing)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._steps.append({"": self._clock() - self._began, **self._spans.take()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.close()
        if self._steps:
            means = self.means()
            self._done(profile_lines(means, len(self._steps)), means)

    def means(self) -> dict[str, float]:
        """Return the mean seconds of a step by part, the largest first, with the rest at the end."""
        steps = self._steps[_WARM_UP:] or self._steps
        parts = {part for step in steps for part in step if part}
        means = {part: sum(step.get(part, 0.0) for step in steps) / len(steps) for part in parts}
        whole = sum(step[""] for step in steps) / len(steps)
        ordered = dict(sorted(means.items(), key=lambda one: -one[1]))
        return {**ordered, REST: max(0.0, whole - sum(means.values()))}

    def close(self) -> None:
        """Leave every function as it was."""
        self._wrapped.close()


def profile_lines(means: dict[str, float], n_steps: int) -> list[str]:
    """Return the table as lines."""
    whole = sum(means.values())
    wide = max(map(len, means))
    head = f"where the time of a step went ({whole:.2f} s on average, of {n_steps} steps)"
    return [
        head,
        *(f"  {part:<{wide}}  {seconds:7.3f} s  {100 * seconds / whole:3.0f} %" for part, seconds in means.items()),
    ]
