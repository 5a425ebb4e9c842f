"""Results of an evaluation, as JSON and as a table: one model,
or two side by side on the same questions.

Episodes that could not be scored (`dropped`) are counted beside: they are neither successes nor
failures, and a question that has fewer than k others is left out of pass@k and maj@k.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from rich.table import Table

from toolgrpo.episode.dropped import Drop
from toolgrpo.episode.tool_calls import INFRASTRUCTURE_CAUSES, NO_NAME, WITHOUT_MARKERS, AttemptStatus, Call
from toolgrpo.errors import DataError
from toolgrpo.evaluation.measures import Difference, Share, majority_at_k, pass_at_k
from toolgrpo.evaluation.verdict import Verdict, tools_and_tasks
from toolgrpo.support.plain_text import listed_counts

_UNKNOWN = "(names of no tool)"
_COUNTED = {  # by a chat endpoint
    "tokens read": "prompt_tokens",
    "tokens written": "completion_tokens",
    "cost": "cost",
}
_GOOD_ENDS = ("finished", "stop_tool")
_HELP = {  # by the end of an episode, or the cause of a failed call
    "max_turns": "--max_turns allows more turns",
    "max_user_turns": "--max_user_turns allows more user messages",
    "length": "--max_completion_length allows more tokens",
    "length_of_turn": "--max_turn_tokens allows longer turns",
    "context_full": "--vllm_max_model_length makes a larger window",
    "deadline": "--episode_timeout allows more seconds",
    "unmarked": "--unmarked_calls accept runs such calls",
    "xml": "--unmarked_calls accept runs such calls",
    "timeout": "--tool_timeout allows more seconds",
    "limit": "--max_tool_calls allows more calls",
}


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """One episode, reduced to what statistics need; small, because processes send these to each other."""

    question: int
    reward: float | None  # None: dropped
    success: bool | None
    answer: str | None
    turns: int
    sampled_tokens: int
    stop_reason: str
    calls: tuple[Call, ...]  # those that were answered
    drop: Drop | None = None
    task: str | None = None  # of its row's column `task`
    repeats: bool = False  # a call is made again whose result is there
    copies: bool = False  # it ends with a copy of its last result
    cut_in_turn: bool = False  # its end `length` is the cap of one turn
    usage: Mapping[str, float] = field(default_factory=dict)  # what a chat endpoint counted
    tools: tuple[str, ...] = ()  # that its row names as right


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

    def shares(self, task: str | None = None) -> dict[str, Share]:
        """Return pass@k and maj@k (on the questions of a task), by name.

        maj@1 is pass@1, and left out; so is maj@2, where a tie is all there can be.
        """
        return {name: Share.of([*of_questions.values()]) for name, of_questions in self.values(task).items()}

    def by_task(self) -> dict[str, dict[str, Share]]:
        """Return the same for the questions of each task, by the name in their column `task`."""
        tasks = {episode.task for episode in self.episodes if episode.task is not None}
        return {task: self.shares(task) for task in sorted(tasks)}

    def values(self, task: str | None = None) -> dict[str, dict[int, float]]:
        """Return pass@k and maj@k of each question (of a task), by name and by the question's number."""
        votes = {
            question: [(one.answer, bool(one.success)) for one in group]
            for question, group in self._scored_by_question().items()
            if task is None or group[0].task == task
        }
        passed = {
            f"pass@{k}": {
                question: pass_at_k(sum(success for _, success in group), len(group), k)
                for question, group in votes.items()
                if len(group) >= k
            }
            for k in self.ks
        }
        majority = {
            f"maj@{k}": {question: majority_at_k(group, k) for question, group in votes.items() if len(group) >= k}
            for k in self.ks
            if k > 2
        }
        return passed | majority

    def tools(self) -> dict[str, dict[str, Any]]:
        """Return, per tool, its calls, failures by cause, and how many episodes used it.

        They stand by how often they were called.
        """
        by_tool: dict[str, list[tuple[int, Call]]] = defaultdict(list)
        for number, episode in enumerate(self.episodes):
            for call in episode.calls:
                by_tool[_tool(call)].append((number, call))
        return {
            tool: self._of_tool([call for _, call in calls], len({number for number, _ in calls}))
            for tool, calls in sorted(by_tool.items(), key=lambda item: -len(item[1]))
        }

    def _of_tool(self, calls: Sequence[Call], n_episodes: int) -> dict[str, Any]:
        causes = Counter(call.error.value for call in calls if call.error is not None)
        return {
            "calls": len(calls),
            "calls_per_episode": len(calls) / len(self.episodes),
            "episodes_using_it": n_episodes / len(self.episodes),
            "failures": causes.total(),
            "failures_by_cause": dict(causes),
            "unmarked": sum(call.status in WITHOUT_MARKERS for call in calls),
            "seconds_p50": median(call.duration_s for call in calls),
        }

    def usage(self) -> dict[str, float]:
        """Return what a chat endpoint counted for all episodes: requests, tokens, and a cost where it names one."""
        counted: dict[str, float] = {}
        for episode in self.episodes:
            for name, number in episode.usage.items():
                counted[name] = counted.get(name, 0) + number
        return counted

    def as_json(self) -> dict[str, Any]:
        rewards = [episode.reward for episode in self.episodes if episode.reward is not None]
        causes = Counter(episode.drop.cause.value for episode in self.episodes if episode.drop is not None)
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
            **({"usage": usage} if (usage := self.usage()) else {}),
            "seconds": self.seconds,
        }

    def lines(self, folder: Path) -> list[str]:
        """Return what the episodes met, a line each, with what helps; `folder` holds their recording."""
        n, calls = len(self.episodes), [call for episode in self.episodes for call in episode.calls]
        ends = Counter("length_of_turn" if one.cut_in_turn else one.stop_reason for one in self.episodes)
        causes = Counter(call.error.value for call in calls if call.error is not None)
        drops = Counter(one.drop.cause.value for one in self.episodes if one.drop is not None)
        repeat, copy = sum(one.repeats for one in self.episodes), sum(one.copies for one in self.episodes)
        teach = "show a whole episode in --system_prompt, or teach it (toolgrpo sft)"
        lines = [f"ends      {listed_counts(ends)} of {n} episodes{_help(ends, folder)}"]
        if calls:
            failed = f"{causes.total()} of {len(calls)} failed"
            lines.append(f"calls     {failed}{f': {listed_counts(causes)}' if causes else ''}{_help(causes, folder)}")
        if drops:
            lines.append(
                f"dropped   {drops.total()} of {n} episodes, neither successes nor failures: {listed_counts(drops)}"
            )
        if lost := sum(causes[cause] for cause in INFRASTRUCTURE_CAUSES):
            lines.append(
                f"lost      {lost} calls got no result from this machine, and count as failures; measure again without other load"
            )
        if repeat:
            lines.append(f"repeats   {repeat} of {n} episodes make a call again whose result they have; {teach}")
        if copy:
            lines.append(f"copies    {copy} of {n} answers are the last result with its <tool_response> tags; {teach}")
        return lines

    def by_question(self) -> list[dict[str, Any]]:
        """Return successes and episodes by the key of each row, to select rows worth training on."""
        groups = self._scored_by_question().items() if self.keys else ()
        return [
            {"key": self.keys[question], "successes": sum(bool(e.success) for e in group), "episodes": len(group)}
            for question, group in groups
        ]

    def _scored_by_question(self) -> dict[int, list[EpisodeFacts]]:
        questions: dict[int, list[EpisodeFacts]] = defaultdict(list)
        for episode in self.episodes:
            if episode.drop is None:
                questions[episode.question].append(episode)
        return questions


def on_shared_questions(model: ModelReport, baseline: ModelReport) -> tuple[ModelReport, ModelReport]:
    """Return two reports with the questions that both were asked: a prompt may be too long for one of the models."""
    if model.keys == baseline.keys:
        return model, baseline
    asked = [_by_key_and_repetition(one.keys) for one in (model, baseline)]
    shared = {key: number for number, key in enumerate(key for key in asked[0] if key in asked[1])}
    if not shared:
        raise DataError(f"no question fits both {model.model} and {baseline.model}, so nothing can be compared")
    return _with_questions(model, asked[0], shared), _with_questions(baseline, asked[1], shared)


def _with_questions(
    report: ModelReport, own: Mapping[tuple[str, int], int], shared: Mapping[tuple[str, int], int]
) -> ModelReport:
    """Return a report with these of its questions, under their new numbers."""
    numbers = {own[key]: number for key, number in shared.items()}
    kept = [replace(one, question=numbers[one.question]) for one in report.episodes if one.question in numbers]
    return replace(report, keys=tuple(key for key, _ in shared), episodes=tuple(kept))


def _by_key_and_repetition(keys: Sequence[str]) -> dict[tuple[str, int], int]:
    """Return the number of each question by its key and how often that stood before."""
    seen = Counter[str]()
    found = {}
    for number, key in enumerate(keys):
        found[key, seen[key]] = number
        seen[key] += 1
    return found


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
        return {
            name: Difference.paired(before[name], after, self._most(name))
            for name, after in self.model.values(task).items()
        }

    def _most(self, name: str) -> float:
        """Return how many independent tries of k episodes a question has."""
        return max(1, self.model.samples // int(name.partition("@")[2]))

    @property
    def verdict(self) -> Verdict | None:
        """Return whether the model is worse than its baseline, by pass@k of the smallest k."""
        if self.baseline is None:
            return None
        measure = f"pass@{self.model.ks[0]}"
        before, after = self.baseline.values()[measure], self.model.values()[measure]
        return Verdict.of(
            measure,
            before,
            after,
            tools_and_tasks([*self.baseline.episodes, *self.model.episodes]),
            self._most(measure),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "questions": self.model.n_questions,
            "samples": self.model.samples,
            "temperature": self.temperature,
            "model": self.model.as_json(),
            "baseline": None if self.baseline is None else self.baseline.as_json(),
            "difference": {name: _with_interval(difference) for name, difference in self.differences().items()},
            **({} if self.verdict is None else {"verdict": self.verdict.as_json()}),
            "by_question": self.model.by_question(),
        }

    def tables(self) -> list[Table]:
        """Return tables of success, of success by task where rows name tasks, and of the tools."""
        reports = [report for report in (self.baseline, self.model) if report is not None]
        by_task = self._task_table(reports)
        return [self._success_table(reports), *([by_task] if by_task.row_count else []), self._tool_table(reports)]

    def _table(self, title: str, first: str, reports: Sequence[ModelReport], *, with_difference: bool) -> Table:
        table = Table(title=title, title_justify="left")
        last = ["difference"] if with_difference and self.baseline else []
        for column in (first, *(report.model for report in reports), *last):
            table.add_column(column, overflow="fold")
        return table

    def _success_table(self, reports: Sequence[ModelReport]) -> Table:
        title = f"{self.model.n_questions} questions, {self.model.samples} episodes each; 95 % intervals"
        table = self._table(title, "", reports, with_difference=True)
        differences = self.differences()
        for name, share in self.model.shares().items():
            last = [str(differences[name])] if name in differences else []
            fewer = f" ({share.n} questions)" if share.n < self.model.n_questions else ""  # dropped episodes
            table.add_row(name + fewer, *(str(report.shares()[name]) for report in reports), *last)
        found = [report.as_json() for report in reports]
        for name, key in (("reward", "reward"), ("turns", "turns"), ("sampled tokens", "sampled_tokens")):
            table.add_row(name, *(_short(report[key]) for report in found))
        counted = [report.usage() for report in reports]
        for name, key in _COUNTED.items():
            if any(key in one for one in counted):
                table.add_row(name, *(f"{one[key]:,.10g}" if key in one else "-" for one in counted))
        if any(report["dropped"]["episodes"] for report in found):
            table.add_row("dropped episodes", *(str(report["dropped"]["episodes"]) for report in found))
        return table

    def _task_table(self, reports: Sequence[ModelReport]) -> Table:
        name = f"pass@{self.model.ks[0]}"
        table = self._table(f"{name} by task; 95 % intervals", "task", reports, with_difference=True)
        by_task = [report.by_task() for report in reports]
        for task in by_task[-1]:
            shares = [of[task][name] for of in by_task]
            last = [str(self.differences(task)[name])] if self.baseline else []
            table.add_row(f"{task} ({shares[-1].n})", *map(str, shares), *last)
        return table

    def _tool_table(self, reports: Sequence[ModelReport]) -> Table:
        table = self._table("calls per episode (share that failed)", "tool", reports, with_difference=False)
        tools = [report.tools() for report in reports]
        names = dict.fromkeys(name for of_model in tools for name in of_model)
        for tool in sorted(names, key=lambda tool: tool == _UNKNOWN):
            cells = (
                f"{of[tool]['calls_per_episode']:.2f} ({of[tool]['failures'] / of[tool]['calls']:.2f})"
                if tool in of
                else "-"
                for of in tools
            )
            table.add_row(tool, *cells)
        if not names:
            table.add_row("(no tool was called)", *("-" for _ in reports))
        return table


def _tool(call: Call) -> str:
    """Return the tool of a call; all made-up names count as one tool."""
    return _UNKNOWN if call.status is AttemptStatus.UNKNOWN_TOOL else call.name or NO_NAME


def _help(counts: Counter[str], folder: Path) -> str:
    """Return what helps against the commonest of these ends or causes."""
    cause = next((name for name, _ in counts.most_common() if name not in _GOOD_ENDS), None)
    if cause is None:
        return ""
    return "; " + _HELP.get(cause, f"toolgrpo show {shlex.quote(str(folder))} --cause {cause} has them")


def _with_interval(share: Share | Difference) -> dict[str, Any]:
    """Return a value with its interval, and on how many questions it stands; without any there is none."""
    n = share.n if isinstance(share, Share) else share.after.n
    return {"value": share.value if n else None, "interval": list(share.interval), "questions": n}


def _short(value: float | Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else f"{value['mean']:.3f} (std {value['std']:.3f})"
