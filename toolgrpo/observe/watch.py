"""The doctor at a run's side: it looks at each log, tells what is wrong, and stops what cannot go on.

Invariants: the same trouble is told at most once in `every` steps; what was told is kept, for the
summary and the recording; only failures of the world stop a run, and then in all processes after
the same rollout.

Not covered: what counts as trouble (`doctor.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from toolgrpo.errors import WorldError
from toolgrpo.observe.doctor import LOGS_KEPT, Finding, findings
from toolgrpo.observe.log_reading import Log

_ALL = 1 - 1e-6


class DoctorWatch(TrainerCallback):  # type: ignore[misc]  # transformers ships no types for mypy here
    """Asks the rules at each log of a training. `every` is 0 where nothing shall be told."""

    def __init__(
        self, say: Callable[[str], None], *, every: int, record: Callable[[Finding], None] | None = None
    ) -> None:
        self._say = say
        self._every = every
        self._record = record
        self._begin()

    def _begin(self) -> None:
        self._logs: deque[Log] = deque(maxlen=LOGS_KEPT)
        self._told_at: dict[str, int] = {}
        self._n_logs = self._n_without_spread = 0
        self.told: list[Finding] = []

    @property
    def learned_nothing(self) -> bool:
        """Whether in all of the training no group of episodes differed in reward."""
        return self._n_logs > 0 and self._n_logs == self._n_without_spread

    def at_end(self) -> list[Finding]:
        """Return what is still wrong after the last step."""
        return findings(list(self._logs), at_end=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._begin()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or "reward" not in logs:
            return
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        self._logs.append({**numbers, "step": float(state.global_step)})
        self._n_logs += 1
        self._n_without_spread += numbers.get("reward/groups_without_spread", 0.0) >= _ALL
        for finding in findings(list(self._logs)) if self._every and state.is_world_process_zero else ():
            before = self._told_at.get(finding.rule)
            if before is None or finding.step - before >= self._every:
                self._told_at[finding.rule] = finding.step
                self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        self.told.append(finding)
        self._say(f"doctor    {finding.sentence} ({finding.link_here})")
        if self._record is not None:
            self._record(finding)


def stop_if_world_fails(metrics: Mapping[str, float], most: float | None) -> None:
    """Raise if a larger share of a rollout's episodes than `most` was failed by the world."""
    share = metrics.get("world/failed_episodes", 0.0)
    if most is None or share <= most:
        return
    causes = {
        "lost by the engine": metrics.get("stop/engine_failure", 0.0),
        "tool calls timed out": metrics.get("tools/error/timeout", 0.0),
        "tool calls lost their process or server": metrics.get("tools/error/died", 0.0),
    }
    engine, *calls = causes.items()
    parts = [f"{100 * engine[1]:.0f} % of the episodes {engine[0]}"] if engine[1] else []
    parts += [f"{count:.0f} {what}" for what, count in calls if count]
    raise WorldError(
        f"{100 * share:.0f} % of the episodes of this rollout were failed by the world, not by the model "
        f"({', '.join(parts) or 'see tools.log'}); what is left is not what you want to train on. Mend the engine or the "
        f"tools and go on with resume_from_checkpoint auto, or raise max_world_failures (now {most:g})."
    )
