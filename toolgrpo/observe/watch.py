"""Watchers of a training, in their order, opened by the trainer's constructor; the doctor among them, which asks its
rules at each log, and what stops a run whose infrastructure fails.

Invariants: the same trouble is told at most once in TOLD_EVERY steps; what was told is kept, for the
summary and the recording; only infrastructure failures stop a run, and then in all processes after
the same rollout.

Not covered: what counts as trouble (`doctor.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from toolgrpo.engines.base import CacheRoom
from toolgrpo.errors import InfrastructureError
from toolgrpo.observe.doctor import LOGS_KEPT, Finding, Log, findings, infrastructure_failures
from toolgrpo.observe.metrics import Known, MetricsLog
from toolgrpo.observe.progress import RunProgress
from toolgrpo.observe.recorder import EpisodeRecorder, episodes_path, token_texts
from toolgrpo.observe.rollout_lines import RolloutLines, RolloutLog
from toolgrpo.observe.steps import StepLog
from toolgrpo.observe.trackers import RolloutTables, guard_trackers
from toolgrpo.rollout import Observer
from toolgrpo.rollout.observers import Observers

TOLD_EVERY = 20  # steps until the same trouble is told again

_ALL = 1 - 1e-6


class DoctorWatch(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Ask the rules at each log of a training."""

    def __init__(self, say: Callable[[str], None], *, record: Callable[[Finding], None] | None = None) -> None:
        self._say = say
        self._record = record
        self._begin()

    def _begin(self) -> None:
        self._logs: deque[Log] = deque(maxlen=LOGS_KEPT)
        self._told_at: dict[str, int] = {}
        self._n_logs = self._n_without_spread = 0
        self.told: list[Finding] = []

    @property
    def learned_nothing(self) -> bool:
        """Return whether no group of the whole training differed in reward."""
        return self._n_logs > 0 and self._n_logs == self._n_without_spread

    def at_end(self) -> list[Finding]:
        """Return the findings that hold after the last step."""
        return findings(list(self._logs), at_end=True)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        self._begin()
        for logged in state.log_history:  # of the steps before a resume
            self._count(logged)

    def on_log(
        self,
        args: object,
        state: TrainerState,
        control: object,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or "reward" not in logs:
            return
        self._count({**logs, "step": state.global_step})
        for finding in findings(list(self._logs)) if state.is_world_process_zero else ():
            before = self._told_at.get(finding.rule)
            if before is None or finding.step - before >= TOLD_EVERY:
                self._told_at[finding.rule] = finding.step
                self._tell(finding)

    def _count(self, logged: Mapping[str, Any]) -> None:
        if "reward" in logged:
            self._logs.append({name: float(value) for name, value in logged.items() if isinstance(value, int | float)})
            self._n_logs += 1
            self._n_without_spread += logged.get("reward/groups_without_spread", 0.0) >= _ALL

    def _tell(self, finding: Finding) -> None:
        self.told.append(finding)
        self._say(f"doctor    {finding.sentence} ({finding.link_here})")
        if self._record is not None:
            self._record(finding)


def stop_if_infrastructure_fails(metrics: Mapping[str, float], most: float | None) -> None:
    """Raise if the infrastructure failed a larger share of a rollout's episodes than `most`."""
    share = metrics.get("infrastructure/failed_episodes", 0.0)
    if most is not None and share > most:
        raise InfrastructureError(
            f"{100 * share:.0f} % of the episodes of this rollout failed for infrastructure reasons, not because of the "
            f"model ({infrastructure_failures(metrics)}); refusing to train on the remainder. Fix the engine or "
            f"the tools and resume with resume_from_checkpoint auto, or raise max_infrastructure_failures (now {most:g})."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Observers of a training, beside those that the user brings."""

    progress: RunProgress
    recorder: EpisodeRecorder
    step_log: StepLog
    metrics: MetricsLog
    tables: RolloutTables
    doctor: DoctorWatch

    def callbacks(self, stop: TrainerCallback, checkpoints: TrainerCallback) -> tuple[TrainerCallback, ...]:
        """Return the callbacks of the training in their order: a stop saves, and a save logs; a log is
        shown before what is said of it.
        """
        return stop, checkpoints, self.step_log, self.tables, self.progress, self.doctor

    def observers(self, of_user: Sequence[Observer]) -> Observers:
        """Return the observers of its rollouts in their order."""
        lines = [RolloutLines(self.progress.say)] if self.progress.lines_only else []
        own = [self.step_log, self.metrics, self.recorder, self.tables, self.progress, RolloutLog(), *lines]
        return Observers([*own, *of_user])


def open_watchers(
    args: Any,
    *,
    tool_names: Sequence[str],
    tokenizer: Any,
    cache: CacheRoom | None,
    progress: RunProgress,
    callbacks: list[TrainerCallback],
    log: Callable[[Mapping[str, float]], None],
    model_name: str,
    process: int,
    is_main: bool,
) -> Watchers:
    """Return the watchers of one process of a run with this config; `log` takes the metrics of a rollout.

    The trackers among TRL's callbacks are guarded, so that none can stop a run.
    """
    recording = episodes_path(Path(args.output_dir), process)
    guard_trackers(callbacks, args.report_to)
    recorder = EpisodeRecorder(recording, share=args.record_episodes, token_text=token_texts(tokenizer))
    step_log = StepLog(
        recording.with_name("steps.jsonl") if is_main else None,
        facts={"model": model_name, "tools": tool_names},
        recorded_bytes=lambda: recorder.n_bytes,
        say=progress.say,
        shows_warnings=progress.brings_own_log,
    )

    def log_unless_infrastructure_fails(metrics: Mapping[str, float]) -> None:
        log(metrics)
        stop_if_infrastructure_fails(metrics, args.max_infrastructure_failures)

    def record(finding: Finding) -> None:
        step = max(0, finding.step - 1)  # steps.jsonl counts those that were done before
        step_log.event("finding", finding.sentence, step=step, rule=finding.rule, section=finding.section)
        tables.alert(f"doctor: {finding.rule}", f"{finding.sentence} ({finding.link})")

    tables = RolloutTables(callbacks, with_tables=args.log_completions)
    return Watchers(
        progress=progress,
        recorder=recorder,
        step_log=step_log,
        metrics=MetricsLog(
            log_unless_infrastructure_fails,
            Known(tool_names, args.episode_limits(), cache),
            args.shaping(),
        ),
        tables=tables,
        doctor=DoctorWatch(progress.say, record=record),
    )
