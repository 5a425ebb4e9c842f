"""What an evaluation found, as JSON and as a table: one model,
or two side by side on the same questions.

Episodes that could not be scored (`dropped`) are counted beside: they are neither successes nor
failures, and a question that has fewer than k others is left out of pass@k and maj@k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from rich.table import Table

from toolgrpo.calls import WITHOUT_MARKERS, AttemptStatus, Call
from toolgrpo.evaluation.measures import Answered, Difference, Share, majority_at_k, pass_at_k

_UNKNOWN = "(names of no tool)"


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """One episode as statistics want it; small, because processes send these to each other."""

    question: int
    reward: float | None  # None: dropped
    success: bool | None
    answer: str | None
    turns: int
    sampled_tokens: int
    stop_reason: str
    calls: tuple[Call, ...]  # those that were answered
    dropped: str | None = None  # the cause
    task: str | None = None  # of its row's column `task`


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model on all questions, `samples` episodes each."""

    model: str
    episodes: tuple[EpisodeFacts, ...]
    samples: int
    ks: tuple[int, ...]
    seconds: float
    keys: tuple[str, ...] = ()  # of the questions, by their numbers

    @property
    def n_questions(self) -> int:
        return len({episode.question for episode in self.episodes})

    def shares(self) -> dict[str, Share]:
        """Return pass@k and maj@k, by name.

        maj@1 is pass@1, and left out; so is maj@2, where a tie is all there can be.
        """
        return _shares(self.values())

    def by_task(self) -> dict[str, dict[str, Share]]:
        """Return the same for the questions of each task, by the name in their column `task`."""
        return {task: _shares(self.values(task)) for task in self.tasks()}

    def tasks(self) -> list[str]:
        return sorted({episode.task for episode in self.episodes if episode.task is not None}, key=str)

    def values(self, task: str | None = None) -> dict[str, dict[int, float]]:
        """Return pass@k and maj@k of each question (of a task), by name and by the question's number."""
        groups = [group for group in self._scored_by_question() if task is None or group[0].task == task]
        values: dict[str, dict[int, float]] = {}
        for k in self.ks:
            enough = [group for group in groups if len(group) >= k]
            values[f"pass@{k}"] = {
                group[0].question: pass_at_k(sum(bool(e.success) for e in group), len(group), k) for group in enough
            }
        for k in self.ks:
            if k > 2:
                values[f"maj@{k}"] = {
                    group[0].question: majority_at_k([Answered(e.answer, bool(e.success)) for e in group], k)
                    for group in groups
                    if len(group) >= k
                }
        return values

    def tools(self) -> dict[str, dict[str, Any]]:
        """Return, per tool, its calls, failures by cause, and how many episodes used it.

        They stand by how often they were called.
        """
        found = {}
        for tool, count in Counter(_tool(call) for episode in self.episodes for call in episode.calls).most_common():
            calls = [[call for call in episode.calls if _tool(call) == tool] for episode in self.episodes]
            of_tool = [call for of_episode in calls for call in of_episode]
            causes = Counter(call.error.value for call in of_tool if call.error is not None)
            found[tool] = {
                "calls": count,
                "calls_per_episode": count / len(self.episodes),
                "episodes_using_it": fmean(map(bool, calls)),
                "failures": causes.total(),
                "failures_by_cause": dict(causes),
                "unmarked": sum(call.status in WITHOUT_MARKERS for call in of_tool),
                "seconds_p50": median(call.duration_s for call in of_tool),
            }
        return found

    def as_json(self) -> dict[str, Any]:
        rewards = [episode.reward for episode in self.episodes if episode.reward is not None]
        causes = Counter(episode.dropped for episode in self.episodes if episode.dropped is not None)
        by_task = {
            task: {"questions": shares[f"pass@{self.ks[0]}"].n, **{n: _with_interval(s) for n, s in shares.items()}}
            for task, shares in self.by_task().items()
        }
        return {
            "model": self.model,
            **{name: _with_interval(share) for name, share in self.shares().items()},
            **({"by_task": by_task} if by_task else {}),
            "reward": {"mean": fmean(rewards), "std": pstdev(rewards), "min": min(rewards), "max": max(rewards)}
            if rewards
            else None,
            "dropped": {"episodes": causes.total(), "causes": dict(causes)},
            "turns": fmean(episode.turns for episode in self.episodes),
            "sampled_tokens": fmean(episode.sampled_tokens for episode in self.episodes),
            "stop_reasons": {
                reason: count / len(self.episodes)
                for reason, count in Counter(episode.stop_reason for episode in self.episodes).most_common()
            },
            "tools": self.tools(),
            "seconds": self.seconds,
        }

    def by_question(self) -> list[dict[str, Any]]:
        """Return how each question did, by the key of its row: what tells which rows are worth training on."""
        return [
            {
                "key": self.keys[group[0].question],
                "successes": sum(bool(e.success) for e in group),
                "episodes": len(group),
            }
            for group in self._scored_by_question()
            if self.keys
        ]

    def _scored_by_question(self) -> list[list[EpisodeFacts]]:
        questions: dict[int, list[EpisodeFacts]] = {}
        for episode in self.episodes:
            if episode.dropped is not None:
                continue
            questions.setdefault(episode.question, []).append(episode)
        return list(questions.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model, and perhaps a baseline, on the same questions."""

    data: str
    temperature: float
    model: ModelReport
    baseline: ModelReport | None = None

    def differences(self, task: str | None = None) -> dict[str, Difference]:
        """Return the differences of pass@k and maj@k (on the questions of a task), by name."""
        if self.baseline is None:
            return {}
        before = self.baseline.values(task)
        return {name: Difference.paired(before[name], after) for name, after in self.model.values(task).items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "questions": self.model.n_questions,
            "samples": self.model.samples,
            "temperature": self.temperature,
            "model": self.model.as_json(),
            "baseline": None if self.baseline is None else self.baseline.as_json(),
            "difference": {name: _with_interval(difference) for name, difference in self.differences().items()},
            "by_question": self.model.by_question(),
        }

    def tables(self) -> list[Table]:
        """Return tables of success, of success by task where rows name tasks, and of the tools."""
        reports = [report for report in (self.baseline, self.model) if report is not None]
        names = [report.model for report in reports]
        title = f"{self.model.n_questions} questions, {self.model.samples} episodes each; 95 % intervals"
        success = _table(title, "", *names, *(["difference"] if self.baseline else []))
        differences = self.differences()
        for name in self.model.shares():
            last = [str(differences[name])] if name in differences else []
            success.add_row(name, *(str(report.shares()[name]) for report in reports), *last)
        found = [report.as_json() for report in reports]
        for name, value in (("reward", "reward"), ("turns", "turns"), ("sampled tokens", "sampled_tokens")):
            success.add_row(name, *(_short(report[value]) for report in found), *([""] if self.baseline else []))
        if any(report["dropped"]["episodes"] for report in found):
            counts = (str(report["dropped"]["episodes"]) for report in found)
            success.add_row("dropped episodes", *counts, *([""] if self.baseline else []))
        by_task = self._task_table(reports, names)
        tools = self._tool_table([report["tools"] for report in found], names)
        return [success, *([by_task] if by_task.row_count else []), tools]

    def _task_table(self, reports: Sequence[ModelReport], names: Sequence[str]) -> Table:
        name = f"pass@{self.model.ks[0]}"
        table = _table(f"{name} by task; 95 % intervals", "task", *names, *(["difference"] if self.baseline else []))
        by_task = [report.by_task() for report in reports]
        for task in by_task[-1]:
            shares = [of[task][name] for of in by_task]
            last = [str(self.differences(task)[name])] if self.baseline else []
            table.add_row(f"{task} ({shares[-1].n})", *map(str, shares), *last)
        return table

    def _tool_table(self, tools: Sequence[Mapping[str, Mapping[str, Any]]], names: Sequence[str]) -> Table:
        table = _table("calls per episode (share that failed)", "tool", *names)
        for tool in sorted(
            dict.fromkeys(name for of_model in tools for name in of_model), key=lambda tool: tool == _UNKNOWN
        ):
            cells = [
                f"{of[tool]['calls_per_episode']:.2f} ({of[tool]['failures'] / of[tool]['calls']:.2f})"
                if tool in of
                else "-"
                for of in tools
            ]
            table.add_row(tool, *cells)
        if not table.row_count:
            table.add_row("(no tool was called)", *("-" for _ in names))
        return table


def _shares(values: Mapping[str, Mapping[int, float]]) -> dict[str, Share]:
    return {name: Share.of([*of_questions.values()]) for name, of_questions in values.items()}


def _tool(call: Call) -> str:
    """Return what a call counts for: names that a model made up are one line, however many there are."""
    return _UNKNOWN if call.status is AttemptStatus.UNKNOWN_TOOL else call.name or "unnamed"


def _with_interval(share: Share | Difference) -> dict[str, Any]:
    return {"value": share.value, "interval": list(share.interval)}


def _short(value: float | Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else f"{value['mean']:.3f} (std {value['std']:.3f})"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
