"""The lines of `toolgrpo check`: one per check, as text and as JSON.

`CheckReport` collects them; the functions below it judge what was drawn, and each adds its lines.
`check.py` loads and draws, and says in which order.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.text import Text

from toolgrpo.draw.play import Tried
from toolgrpo.evaluation.before_training import Road, Untrained, main_cause, road_of, spread
from toolgrpo.evaluation.measures import wilson_interval
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes
from toolgrpo.observe.doctor import why_broken
from toolgrpo.observe.metrics import cut_in_turn
from toolgrpo.rollout import EpisodeLimits, RolloutBatch
from toolgrpo.support.plain_text import counted, duration, listed_counts, percent, plain
from toolgrpo.support.shipped_files import page_here


class CheckVerdict(StrEnum):
    PASS = "pass"
    WARNING = "warning"
    FAILURE = "failure"


_CUT = 0.05  # share of the episodes that may be cut without a warning

_COLOURS = {CheckVerdict.PASS: "green", CheckVerdict.WARNING: "yellow", CheckVerdict.FAILURE: "bold red"}
_CLOSING = {CheckVerdict.FAILURE: "failed", CheckVerdict.WARNING: "with a warning", CheckVerdict.PASS: "passed"}


@dataclass(frozen=True, slots=True)
class CheckLine:
    """The result of one check; `do` says how to fix it."""

    verdict: CheckVerdict
    what: str
    said: str
    do: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def shown(self) -> Text:
        line = Text(f"{self.verdict:<8} {self.what:<11} ", style="")
        line.stylize(_COLOURS[self.verdict], 0, len(self.verdict))
        return line.append(plain(self.said + (f". {self.do}" if self.do else "")).replace("\n", " "))


class CheckReport:
    """The lines in their order; `show` gets each as soon as it is known."""

    def __init__(self, show: Callable[[CheckLine], None]) -> None:
        self.lines: list[CheckLine] = []
        self._show = show

    def add(self, what: str, said: str, *, warning: str = "", failure: str = "", **numbers: Any) -> None:
        """Add a line that passes unless it says what to do: as a warning, or as a failure."""
        verdict = CheckVerdict.FAILURE if failure else CheckVerdict.WARNING if warning else CheckVerdict.PASS
        self._add(CheckLine(verdict, what, said, failure or warning, numbers))

    def failed(self, what: str, said: str) -> None:
        """Add a failure whose text says what to do."""
        self._add(CheckLine(CheckVerdict.FAILURE, what, said))

    def _add(self, line: CheckLine) -> None:
        self.lines.append(line)
        self._show(line)

    def count(self, verdict: CheckVerdict) -> int:
        return sum(line.verdict is verdict for line in self.lines)

    @property
    def exit_code(self) -> int:
        return int(self.count(CheckVerdict.FAILURE) > 0)

    def closing(self) -> str:
        counts = [f"{n} {text}" for verdict, text in _CLOSING.items() if (n := self.count(verdict))]
        return f"{len(self.lines)} checks: {', '.join(counts)}"

    def as_json(self) -> str:
        whole = {
            "passed": self.exit_code == 0,
            "counts": {verdict.value: self.count(verdict) for verdict in CheckVerdict},
            "checks": [asdict(line) for line in self.lines],
        }
        return json.dumps(whole, indent=2, default=str)


def add_tried(report: CheckReport, tried: Tried) -> None:
    """Add a line for each fault that drawn arguments found, or one for all tools."""
    for fault in tried.faults:
        warning = "A model will send worse arguments: fix the tool, or leave it out"
        report.add("tools", f"{fault.tool}: {fault.said}", warning=warning, tool=fault.tool, fault=fault.kind)
    silent = [name for name, n in tried.answered.items() if not n]
    answered = len(tried.answered) - len(silent)
    said = f"{answered} of {len(tried.answered)} answered drawn arguments"
    said += f" (not {', '.join(silent)})" if silent else ""
    if tried.not_called:
        said += f"; not called, as their server does not mark them readOnlyHint: {', '.join(tried.not_called)}"
    report.add("tools", said, answered=answered, silent=silent, not_called=list(tried.not_called))


def add_prompts(report: CheckReport, lengths: Sequence[int], window: int, limits: EpisodeLimits) -> None:
    budget = limits.max_completion_length
    left = window - max(lengths)
    said = f"tokens of {len(lengths)} prompts: {spread(lengths)}; the window of {window} leaves {left} for an episode of {budget}"
    failure = "Shorten them, or raise --vllm_max_model_length" if left < 1 else ""
    warning = ""
    if left < budget and limits.context is None:  # else the budget is that of all segments
        warning = (
            "Long episodes end with stop/context_full; raise --vllm_max_model_length or lower --max_completion_length"
        )
    numbers: dict[str, Any] = {"longest": max(lengths), "median": median(lengths), "window": window, "budget": budget}
    report.add("prompts", said, warning=warning, failure=failure, **numbers)


def add_calls(report: CheckReport, facts: Untrained, batch: RolloutBatch, tool_names: Sequence[str]) -> None:
    said = f"{percent(facts.calling)} of {facts.episodes} episodes call a tool well; {facts.calls} calls"
    if facts.malformed:
        said += f", {facts.malformed.total()} of them cannot be run ({listed_counts(facts.malformed)})"
    if facts.failed:
        said += f", {facts.failed.total()} fail ({listed_counts(facts.failed)})"
    forms = count_lookalikes(batch.trajectories, tool_names)
    if forms:
        written = ", ".join(f"{FORMS[form]} ({count})" for form, count in forms.most_common())
        said += f"; {forms.total()} turns look like calls in another form: {written}"
    warning, why = "", why_broken(facts.malformed + facts.failed, facts.calls, least=4)
    if facts.calling == 0:
        warning = "Teach the form first (toolgrpo sft), put worked examples before the questions"
        if facts.malformed["unmarked"] + facts.malformed["xml"]:
            warning += ", or run such calls with --unmarked_calls accept"
    elif why is not None:
        said += why
        warning = f"Continue `toolgrpo sft` until most calls can be run ({page_here('calls-that-fail')})"
    elif max(facts.malformed.total(), facts.failed.total()) > facts.calls / 2:
        warning = "Read some in `toolgrpo evaluate`, and fix what the tools say"
    numbers: dict[str, Any] = {"calling": facts.calling, "calls": facts.calls, "malformed": dict(facts.malformed)}
    report.add("calls", said, warning=warning, **numbers)


def add_budget(
    report: CheckReport, facts: Untrained, batch: RolloutBatch, length: Callable[[str], int], limits: EpisodeLimits
) -> None:
    """Compare episodes and tool results with their limits; `length` counts the tokens of a text."""
    results = [result for trajectory in batch.trajectories for result in trajectory.results]
    if results:
        lengths, cut = [length(result.content) for result in results], sum(result.truncated for result in results)
        warning = "Raise --max_tool_response_tokens, or make tools return less" if cut > len(results) / 4 else ""
        said = f"tokens of {len(results)} results: {spread(lengths)}; {cut} were cut"
        report.add("results", said, warning=warning, cut=cut, longest=max(lengths))
    in_turn = sum(cut_in_turn(trajectory, limits) for trajectory in batch.trajectories)
    cuts = {
        "--max_turn_tokens": in_turn,
        "--max_completion_length": facts.stops["length"] - in_turn,
        "--vllm_max_model_length": facts.stops["context_full"],
        "--max_turns": facts.stops["max_turns"],
    }
    short = sum(cuts.values())
    by = ", ".join(f"{flag} ({count})" for flag, count in cuts.items() if count)
    warning = f"{short} were cut: raise {by}" if short > _CUT * len(batch) else ""
    episodes = spread([len(trajectory.ids) for trajectory in batch.trajectories])
    said = f"tokens of {len(batch)} episodes: {episodes}; they end with {listed_counts(facts.stops)}"
    report.add("length", said, warning=warning, stops=dict(facts.stops))
    if facts.copied:
        said = f"{facts.copied} of {len(batch)} episodes end with a copy of the last result in its <tool_response> tags"
        report.add("answers", said, warning="Ask for answers in --system_prompt, or show some first (toolgrpo sft)")
    if facts.stops["engine_failure"]:
        report.add("engine", f"{facts.stops['engine_failure']} episodes were lost", failure="See the log")


def add_success(report: CheckReport, facts: Untrained) -> None:
    said = (
        f"pass@1 {facts.pass_1:.2f}, pass@{facts.k} {facts.pass_k:.2f} on {facts.n} questions; rewards from "
        f"{min(facts.rewards):g} to {max(facts.rewards):g}; they differ in {percent(facts.live)} of the groups"
    )
    warning = ""
    if facts.never:
        of = ", ".join(f"{task} ({n})" for task, n in facts.never.items())
        said += f"; no episode succeeds of task {of}"
        warning = "These rows teach nothing yet: show worked calls first (toolgrpo sft), or use easier rows"
    numbers: dict[str, Any] = {"pass_1": facts.pass_1, "pass_k": facts.pass_k, "k": facts.k, "live": facts.live}
    report.add("success", said, warning=warning, **numbers)


def add_road(
    report: CheckReport,
    facts: Untrained,
    train: str,
    draw: str,
    teach: str,
    worked: Path | None,
    whole_run_s: float | None,
) -> None:
    """Say which road to a trained model fits, and the command that begins it, each with what the check was given.

    `draw` evaluates the rows to train on; `worked` has conversations of them, if they were drawn from tools.
    """
    road, (low, high) = road_of(facts), wilson_interval(facts.mixed, facts.n)
    groups = f"in {facts.mixed} of {counted(facts.n, 'group')} some episodes succeed and some fail"
    cause = main_cause(facts)
    numbers: dict[str, Any] = {"mixed": facts.mixed, "groups": facts.n, "low": low, "high": high}
    shared = (
        ", held-out ones too (eval_share): first put those into a file of their own" if "eval_share" in draw else ""
    )
    own = (
        f". Where nobody can write calls, sample more episodes of these rows{shared}, and learn from those that succeed: "
        f"{draw} --samples 16 --output_dir outputs/own; {teach} --from_run outputs/own"
    )
    said, do = {
        Road.LEAVE: (f"{percent(facts.pass_1)} of the episodes succeed", "Use harder rows, if there are any"),
        Road.REINFORCE: (
            f"{groups}, so {percent(low)} to {percent(high)} of all"
            + ("" if whole_run_s is None else f"; the whole run takes about {duration(whole_run_s)}")
            + f": {train}",
            "",
        ),
        Road.MEND: (
            f"a limit ends {facts.cut} of the {facts.callers} episodes that call a tool",
            "Raise what the line `length` names",
        )
        if cause is None
        else (
            f"hardly any success, and most calls go wrong in one way, {cause}",
            f"Read them: {draw} --output_dir outputs/calls; toolgrpo show outputs/calls/model --cause {cause}",
        ),
        Road.SHOW: (
            f"{groups}, which is too rare"
            if facts.mixed
            else "where a group fails, all its episodes fail, so there is nothing to reinforce",
            f"Use easier rows, or {teach} --dataset_id_or_path "
            + (
                "WORKED.jsonl, with system messages as in a training; a larger model can play them "
                if worked is None
                else f"{shlex.quote(str(worked))} "
            )
            + f"({page_here('where-every-episode-fails', page='docs/background/dead_groups.md')})"
            + (own if facts.mixed else ""),
        ),
    }[road]
    report.add("road", f"{road}: {said}", warning=do, road=road.value, whole_run_s=whole_run_s, **numbers)


def add_step(report: CheckReport, logged: Mapping[str, float], step_s: float, rollout_s: float) -> None:
    said = f"done in {step_s:.1f} s ({rollout_s:.1f} s of it the rollout), loss {logged.get('loss', 0.0):.3g}"
    gradient = logged.get("grad_norm")
    if gradient is None or not math.isfinite(gradient):
        report.add("step", f"{said}, gradient {gradient}", failure="A gradient must be a number: see the log")
    else:
        dead = f"No group differed in reward, so this step taught nothing; see {page_here()}"
        warning = "" if gradient else dead
        report.add("step", f"{said}, gradient {gradient:.3g}", warning=warning, seconds=step_s, grad_norm=gradient)


def add_agreement(report: CheckReport, differences: Sequence[float], largest: float, when: str) -> None:
    """Compare the log-probabilities of engine and trainer, token by token."""
    if not differences:
        said = f"{when}, but the engine gives no log-probabilities to compare"
        do = "Nothing corrects for a difference; engine transformers has the trainer's own"
        report.add("weights", said, warning=do)
        return
    difference = fmean(differences)
    said = f"{when}; log-probabilities of engine and trainer differ by {difference:.1e} on average"
    failure = (
        f"Both should hold one model: see {page_here(page='docs/how-to/engines.md')}" if difference > largest else ""
    )
    report.add("weights", said, failure=failure, difference=difference)
