"""The doctor: rules that name in one sentence, with numbers, what goes wrong in a training.

`RULES` is the table. Each rule looks at the last few logs of a run (what TRL logs, as
`trainer_state.json` keeps it), yields its sentence if it holds, and names the section of
docs/how-to/troubleshooting.md that goes on from there. `findings` asks all of them; `over_run` asks them at
every log of a run that is over.

Invariants: a rule is silent where a metric that it needs is missing, because a missing metric is NaN
and no comparison holds of NaN; it never raises; it looks at nothing but the logs.

Not covered: who is told of it and how often (`watch.py`); the episodes themselves (`report`, `show`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import correlation

from toolgrpo.engines.base import MORE_ROOM
from toolgrpo.episode.tool_calls import INFRASTRUCTURE_CAUSES, NO_NAME, NO_TOOL
from toolgrpo.observe.call_lookalikes import FORMS
from toolgrpo.support.plain_text import percent
from toolgrpo.support.shipped_files import TROUBLESHOOTING, page_here

LOGS_KEPT = 160  # no rule looks further back

_SHORT, _LONG = 3, 10  # values that a rule looks at: of a state, of a trend
_SLOW = (1, 4, 16)  # logs that are one value of a trend, so that one over a hundred steps is seen like one over ten
_FALLS = -0.85  # correlation with time, of ten values: a slope of four and a half standard errors
_SWAY = 0.1  # by which the success of a few batches differs with the rows that were drawn
PARSE_CAUSES = {
    "invalid_json": "the call holds no valid JSON",
    "unclosed": "the call is never closed",
    "missing_name": "the call names no tool",
    "unmarked": "the call has no markers",
    "xml": "the call is written in XML tags, not in JSON",
    "unknown_tool": "there is no tool of that name",
    "bad_arguments": "the arguments do not fit the schema",
}
_CAUSES_OF_FAILURE = (
    "infrastructure_fails",
    "no_tool_calls",
    "reward_reads_markers",
    "broken_calls",
    "cut_by_length",
    "tool_fails",
    "copied_results",
)
_NOTHING = ", so nothing is learned"
_LOST = {"timeout": "timed out", "died": "lost their process or server"}

Log = Mapping[str, float]
"""One log of a training: metrics by name, and `step`, the step after which it was written."""


class Logs:
    """The last few logs of a training, as the rules ask about them. A metric that is missing is NaN."""

    def __init__(self, logs: Sequence[Log], pace: int = 1) -> None:
        self._logs, self._pace = logs, pace

    def __len__(self) -> int:
        return len(self._logs)

    def each(self, name: str) -> list[float]:
        """Return the values in their order: one for each log, or the mean of each `pace` of them."""
        values = [log.get(name, math.nan) for log in self._logs]
        return [sum(values[i : i + self._pace]) / self._pace for i in range(0, len(values), self._pace)]

    def last(self, name: str) -> float:
        return self._logs[-1].get(name, math.nan)

    def mean(self, name: str) -> float:
        """Return the mean of the logs that have it."""
        values = [log[name] for log in self._logs if name in log]
        return sum(values) / len(values) if values else math.nan

    def total(self, name: str) -> float:
        return sum(log.get(name, 0.0) for log in self._logs)

    def trend(self, name: str) -> tuple[float, float]:
        """Return the mean of the first three logs and that of the last three."""
        values = self.each(name)
        return sum(values[:3]) / len(values[:3]), sum(values[-3:]) / len(values[-3:])

    @property
    def span(self) -> str:
        if "step" not in self._logs[-1]:
            return f"in {len(self)} logs"
        first, last = int(self._logs[0].get("step", 0)), int(self._logs[-1]["step"])
        return f"at step {last}" if first == last else f"in steps {first} to {last}"

    @property
    def tools(self) -> list[str]:
        """Return the tools that are offered or were called, by their names in the metrics."""
        names = {name for log in self._logs for name in log if name.startswith("tools/") and name.endswith("/calls")}
        return sorted(name.removeprefix("tools/").removesuffix("/calls") for name in names)

    @property
    def named_tools(self) -> list[str]:
        """Return those that exist: calls that name no tool, or a made-up one, are another matter."""
        return [name for name in self.tools if name not in (NO_NAME, NO_TOOL)]

    @property
    def reading_markers(self) -> list[str]:
        """Return the rewards whose files look for a marker of calls."""
        names = {name for log in self._logs for name in log if name.endswith("/looks_for_marker")}
        return sorted(name.removeprefix("rewards/").removesuffix("/looks_for_marker") for name in names)

    @property
    def calls(self) -> float:
        # Of many tools only those that were called have numbers, which a log of several steps averages over those steps.
        return sum(
            log.get("tools/called", sum(log.get(f"tools/{name}/calls", 0.0) for name in self.tools))
            for log in self._logs
        )

    def share_failed(self, tool: str) -> float:
        calls = self.total(f"tools/{tool}/calls")
        return self.total(f"tools/{tool}/failures") / calls if calls >= 10 else 0.0

    @property
    def errors(self) -> Counter[str]:
        """Return the calls without a good result, by cause."""
        names = {name for log in self._logs for name in log if name.startswith("tools/error/")}
        return Counter({name.removeprefix("tools/error/"): self.total(name) for name in sorted(names)})

    @property
    def why_broken(self) -> str | None:
        return why_broken(self.errors, self.calls)

    @property
    def episodes(self) -> float:
        """Return the number of episodes: all sampled tokens, divided by the mean of an episode."""
        pairs = zip(self.each("rollout/sampled_tokens"), self.each("completions/mean_length"), strict=True)
        return sum(tokens / mean for tokens, mean in pairs if mean)

    @property
    def cut(self) -> dict[str, float]:
        """Return the share of the episodes that each limit has cut."""
        by_turn = self.total("stop/length_of_turn") / len(self)
        return {
            "max_turn_tokens": by_turn,
            "max_completion_length": max(self.mean("stop/length") - by_turn, 0.0),
            "the context window (vllm_max_model_length)": self.mean("stop/context_full"),
        }

    @property
    def dead(self) -> str:
        """Return a clause saying that nearly all groups are dead, or an empty text if they are not."""
        share = self.mean("reward/groups_without_spread")
        if not all(one >= 0.9 for one in self.each("reward/groups_without_spread")):
            return ""
        whole = "no group differs" if share >= 1.0 else f"{percent(share)} of the groups do not differ"
        return f"{whole} in reward {self.span}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that goes wrong: its name, where it is explained, how many values it takes to see it, at which paces."""

    name: str
    section: str
    logs: int
    look: Callable[[Logs], Iterator[str]]
    tool: Callable[[Logs], str | None] = lambda logs: None  # the one that it is about, if it is about one
    paces: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds, and after which step."""

    rule: str
    section: str
    step: int
    sentence: str
    tool: str | None = None

    @property
    def link(self) -> str:
        return f"{TROUBLESHOOTING}#{self.section}"

    @property
    def link_here(self) -> str:
        return page_here(self.section)


def findings(logs: Sequence[Log], *, at_end: bool = False) -> list[Finding]:
    """Return the findings of the last logs.

    A rule that has not seen enough of them is silent; at the end of a run it looks at what there
    is.
    """
    trained = [log for log in logs if "reward" in log]
    found = []
    for rule in RULES:
        for pace in rule.paces:
            last = Logs(trained[-rule.logs * pace :], pace)
            enough = len(last) == rule.logs * pace or (at_end and bool(trained) and rule.logs == _SHORT)
            if enough and (sentences := list(rule.look(last))):
                step, tool = int(trained[-1].get("step", 0)), rule.tool(last)
                found += [Finding(rule.name, rule.section, step, sentence, tool) for sentence in sentences]
                break
    return _one_for_each_cause(found)


def _one_for_each_cause(found: list[Finding]) -> list[Finding]:
    """Let the likeliest cause of failure say itself that nothing is learned; without one the groups say it."""
    cause = next((one for one in found if one.rule in _CAUSES_OF_FAILURE), None)
    failed = next((one for one in found if one.rule == "groups_all_failed"), None)
    if cause is None or failed is None:
        return found
    what = failed.sentence.partition(_NOTHING)[0] + _NOTHING
    both = replace(cause, sentence=f"{cause.sentence}; {what}")
    return [both if one is cause else one for one in found if one is not failed]


def over_run(logs: Iterable[Log]) -> Iterator[Finding]:
    """Yield the findings after each log of a finished run, keeping only the last few logs in memory."""
    trained = (log for log in logs if "reward" in log)
    last: deque[Log] = deque(maxlen=LOGS_KEPT)
    following = next(trained, None)
    while following is not None:
        last.append(following)
        following = next(trained, None)
        yield from findings(list(last), at_end=following is None)


def why_broken(errors: Mapping[str, float], calls: float, *, least: int = 10) -> str | None:
    """Return why calls cannot be run, to be added to a sentence, where so many cannot that it matters.

    `errors` counts calls by cause; causes that are not about the form are passed over. Fewer than
    `least` calls say nothing.
    """
    counts = {cause: errors.get(cause, 0) for cause in PARSE_CAUSES}
    broken, cause = sum(counts.values()), max(counts, key=lambda cause: counts[cause])
    if not calls or broken < least:
        return None
    if broken >= 0.2 * calls and counts[cause] >= 0.7 * broken:
        return f", most of them for one cause: {PARSE_CAUSES[cause]}"
    if broken < 0.4 * calls:
        return None
    return ": the model does not know the form of calls yet, which `toolgrpo sft` teaches"


def infrastructure_failures(metrics: Log) -> str:
    """Return the infrastructure failures of a rollout as part of a sentence."""
    engine = metrics.get("stop/engine_failure", 0.0)
    counts = {cause: metrics.get(f"tools/error/{cause}", 0.0) for cause in INFRASTRUCTURE_CAUSES}
    parts = [f"{percent(engine)} lost by the engine"] if engine else []
    parts += [f"{round(count, 1):g} tool calls {_LOST[cause]}" for cause, count in counts.items() if count]
    return ", ".join(parts) or "see tools.log"


def _listed(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{percent(share)} by {name}" for name, share in ordered if share >= 0.005)


# The rules, in the order of the table.


def _infrastructure_fails(logs: Logs) -> Iterator[str]:
    share, slow = logs.mean("infrastructure/failed_episodes"), logs.last("tools/latency_p95")
    if share >= 0.1:
        engine = {"stop/engine_failure": logs.total("stop/engine_failure") / len(logs)}
        causes = infrastructure_failures(engine | {f"tools/error/{c}": n / len(logs) for c, n in logs.errors.items()})
        slowest = "" if math.isnan(slow) else f"; one call in twenty takes {slow:.1f} s or more"
        yield f"the infrastructure fails in {percent(share)} of the episodes {logs.span} (of a rollout: {causes}){slowest}"


def _no_tool_calls(logs: Logs) -> Iterator[str]:
    calls = logs.calls - logs.total("tools/error/unmarked")  # those are answered, and not run
    at_limit = logs.total("stop/max_turns") / len(logs) * logs.episodes  # their last calls are not run
    if not logs.tools or not logs.episodes > 0 or calls + at_limit > 0.05 * logs.episodes:
        return
    said = f"no tool is called: {calls / logs.episodes:.2f} calls per episode {logs.span}"
    forms = {form: logs.total(f"answers/like_calls/{form}") / len(logs) for form in FORMS}
    ordered = sorted(forms.items(), key=lambda item: -item[1])
    written = [f"{FORMS[form]} ({count:.3g})" for form, count in ordered if count]
    if written:
        turns = sum(forms.values())
        said += f"; {turns:.3g} turns of a rollout look like calls in another form: {', '.join(written)}"
    yield said


def _reward_reads_markers(logs: Logs) -> Iterator[str]:
    for name in logs.reading_markers:
        mean, std = f"rewards/{name}/mean", f"rewards/{name}/std"
        score = logs.last(mean)
        off = [*logs.each(std), *(abs(one - score) for one in logs.each(mean))]
        if logs.calls and all(one <= 1e-6 for one in off):  # rounding
            yield (
                f"the reward {name} gives every episode {score:.3g} {logs.span}, and its file looks for a marker of calls in "
                f"the text: calls are in `tool_calls` of a message, and in `calls(trajectory)`"
            )


def _groups_all_failed(logs: Logs) -> Iterator[str]:
    success, cut = logs.mean("success"), sum(logs.cut.values())
    if not logs.dead or not success <= 0.1:
        return
    reasons = []
    if cut > 0.3:
        reasons.append(f"{percent(cut)} of the episodes are cut, {_listed(logs.cut)}")
    if logs.tools and logs.calls == 0:
        reasons.append("no tool is called")
    elif logs.total("tools/failure_frequency") > 0.5 * len(logs):
        reasons.append(f"{percent(logs.mean('tools/failure_frequency'))} of the tool calls fail")
    why = f": {'; '.join(reasons)}" if reasons else ""
    yield f"{logs.dead}, and their episodes fail (success {success:.2f}){_NOTHING}{why}"


def _groups_all_solved(logs: Logs) -> Iterator[str]:
    success = logs.mean("success")
    if logs.dead and success >= 0.9:
        yield (f"{logs.dead}, because they are solved (success {success:.2f}): little is left to learn from these rows")


def _groups_all_alike(logs: Logs) -> Iterator[str]:
    success = logs.mean("success")
    if logs.dead and 0.1 < success < 0.9:
        yield (
            f"{logs.dead} at success {success:.2f}: the episodes of a group all succeed or all fail, and nothing is learned"
        )


def _broken_calls(logs: Logs) -> Iterator[str]:
    calls, errors = logs.calls, Counter({cause: logs.errors[cause] for cause in PARSE_CAUSES})
    why = logs.why_broken
    if why is not None:
        by = ", ".join(f"{name} {percent(n / calls)}" for name, n in errors.most_common() if n >= 0.005 * calls)
        yield f"{percent(errors.total() / calls)} of the calls {logs.span} cannot be run ({by}){why}"


def _cut_by_length(logs: Logs) -> Iterator[str]:
    share = sum(logs.cut.values())
    if share > 0.5:
        yield f"{percent(share)} of the episodes {logs.span} are cut: {_listed(logs.cut)}"


def _worst_tool(logs: Logs) -> str:
    return max(logs.named_tools, key=logs.share_failed, default="")


def _tool_fails(logs: Logs) -> Iterator[str]:
    tool = _worst_tool(logs)
    by_form = logs.why_broken is not None and any(cause in PARSE_CAUSES for cause, _ in logs.errors.most_common(1))
    if logs.share_failed(tool) >= 0.5 and not by_form:  # `broken_calls` says that
        causes = ", ".join(f"{cause} {n / len(logs):.3g}" for cause, n in logs.errors.most_common(3) if n)
        yield (
            f"the tool {tool} fails: {percent(logs.share_failed(tool))} of its calls {logs.span} (failures of all tools "
            f"a rollout: {causes})"
        )


def _engine_differs(logs: Logs) -> Iterator[str]:
    differences = logs.each("sampling/sampling_logp_difference/mean")
    if all(difference > 0.02 for difference in differences):
        yield (
            f"engine and trainer disagree: their log-probabilities of the same tokens differ by {differences[-1]:.3f} on "
            f"average {logs.span} (below 0.01 is usual)"
        )


def _engine_draws_oddly(logs: Logs) -> Iterator[str]:
    surprise, entropy = logs.mean("sampling/surprise"), logs.mean("entropy")
    if surprise > 2.0 + 3.0 * entropy:
        yield (
            f"the engine samples tokens that it calls improbable itself: {surprise:.1f} nats per token {logs.span}, where "
            f"{entropy:.2g} would follow from its distribution; the samples do not follow the model"
        )


def _lengths_weighted_unlike(logs: Logs) -> Iterator[str]:
    masked, ess = (
        [logs.mean(f"correction/{name}/{quarter}") for quarter in ("q1", "q4")] for name in ("masked_episodes", "ess")
    )
    if abs(masked[1] - masked[0]) >= 0.1:
        yield (
            f"the off-policy correction chooses by length: it leaves out {percent(masked[1])} of the longest quarter of "
            f"the episodes {logs.span} and {percent(masked[0])} of the shortest (rollout_correction)"
        )
    elif ess[1] <= 0.5 and ess[1] <= 0.7 * ess[0]:
        yield (
            f"the off-policy correction turns long episodes into noise: the weights of the longest quarter {logs.span} leave "
            f"{percent(ess[1])} of their tokens' effect, those of the shortest {percent(ess[0])} (rollout_correction)"
        )


def _cache_is_small(logs: Logs) -> Iterator[str]:
    demand = logs.last("engine/cache_demand")
    if demand > 2:
        yield (
            f"the engine's cache is small: the episodes that may run at a time need {demand:.1f} times its tokens when they "
            f"are half grown, and those without room are computed again ({MORE_ROOM})"
        )


def _void_turns(logs: Logs) -> Iterator[str]:
    share = logs.mean("turns/void")
    if share >= 0.1 and logs.why_broken is None and not sum(logs.cut.values()) > 0.5:  # others say why
        yield f"{percent(share)} of the turns {logs.span} hold neither a readable call nor an answer"


def _copied_results(logs: Logs) -> Iterator[str]:
    share = logs.mean("answers/copied_result")
    if share >= 0.2:
        yield (
            f"{percent(share)} of the episodes {logs.span} answer with a copy of the last result in its <tool_response> "
            f"tags: the model continues the prompt instead of answering it"
        )


def _entropy_collapses(logs: Logs) -> Iterator[str]:
    values = logs.each("entropy")
    before, now = max(values[:3]), sum(values[-3:]) / 3
    if before > 0 and now <= 0.25 * before and not logs.each("success")[-1] >= 0.9:
        yield f"the entropy collapses: from {before:.3g} to {now:.3g} {logs.span}, so the episodes of a group become alike"


def _tool_never_used(logs: Logs) -> Iterator[str]:
    unused = [name for name in logs.named_tools if not logs.total(f"tools/{name}/calls")]
    if unused and logs.calls >= 50:
        names = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        yield f"never called {logs.span}, in which a rollout has {logs.calls / len(logs):.3g} calls: {names}"


def _calls_given_up(logs: Logs) -> Iterator[str]:
    (calls, calls_now), (success, success_now) = logs.trend("tools/call_frequency"), logs.trend("success")
    if calls >= 0.5 and 0.05 < calls_now <= 0.7 * calls and success_now - success <= _SWAY and success_now < 0.9:
        values = logs.each("tools/call_frequency")
        if correlation(range(len(values)), values) > _FALLS:  # a few episodes a step call more and less by chance
            return
        yield (
            f"the model gives up calls: an episode has {calls_now:.2f} of them, down from {calls:.2f}, {logs.span}, while success "
            f"goes from {success:.2f} to {success_now:.2f}"
        )


def _reward_without_success(logs: Logs) -> Iterator[str]:
    (reward, now), (success, success_now) = logs.trend("reward"), logs.trend("success")
    rise = max(0.05, 0.5 * logs.trend("reward_std")[0])
    if now - reward >= rise and success_now - success <= 0.02 and success_now < 0.9:
        yield (
            f"the reward rises from {reward:.2f} to {now:.2f} {logs.span}, while success goes from {success:.2f} to "
            f"{success_now:.2f}: something other than success is rewarded"
        )


RULES: tuple[Rule, ...] = (
    Rule("infrastructure_fails", "slow-tools", _SHORT, _infrastructure_fails),
    Rule("no_tool_calls", "the-model-does-not-call-tools", _SHORT, _no_tool_calls),
    Rule("reward_reads_markers", "low-rewards-throughout", _SHORT, _reward_reads_markers),
    Rule("groups_all_failed", "low-rewards-throughout", _SHORT, _groups_all_failed),
    Rule("groups_all_solved", "reward-collapse", _SHORT, _groups_all_solved),
    Rule("groups_all_alike", "entropy-collapse", _SHORT, _groups_all_alike),
    Rule("broken_calls", "calls-that-fail", _SHORT, _broken_calls),
    Rule("cut_by_length", "length-and-truncation", _SHORT, _cut_by_length),
    Rule("tool_fails", "calls-that-fail", _SHORT, _tool_fails, _worst_tool),
    Rule("engine_differs", "vllm-and-the-trainer-disagree", _SHORT, _engine_differs),
    Rule("engine_draws_oddly", "vllm-and-the-trainer-disagree", _SHORT, _engine_draws_oddly),
    Rule("cache_is_small", "out-of-memory", _SHORT, _cache_is_small),
    Rule("lengths_weighted_unlike", "vllm-and-the-trainer-disagree", _SHORT, _lengths_weighted_unlike),
    Rule("void_turns", "length-and-truncation", _SHORT, _void_turns),
    Rule("copied_results", "calls-that-fail", _SHORT, _copied_results),
    Rule("entropy_collapses", "entropy-collapse", _LONG, _entropy_collapses, paces=_SLOW[:2]),
    Rule("tool_never_used", "the-model-does-not-call-tools", _LONG, _tool_never_used),
    Rule("calls_given_up", "the-model-does-not-call-tools", _LONG, _calls_given_up, paces=_SLOW),
    Rule("reward_without_success", "sparse-and-dense-rewards", _LONG, _reward_without_success, paces=_SLOW),
)
"""Every rule, in the order in which findings are told."""
