"""What a person finds out about a run a day later, said in one sentence when it begins.

`RULES` is the table: each rule is a pure function of the last few logs of a run (what TRL logs, as
`trainer_state.json` keeps it) and returns its sentence, with the numbers in it, or None. Each names
the section of docs/training_issues.md that goes on from there. `findings` asks all of them;
`over_run` asks them at every log of a run that is over.

Invariants: a rule is silent where a metric that it needs is missing; it never raises; it looks at
nothing but the logs.

Not covered: who hears of it and how often (`watch.py`); the episodes themselves (`report`, `show`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from toolgrpo.observe.call_lookalikes import FORMS

__all__ = ["DOCS", "RULES", "Finding", "Log", "Rule", "findings", "over_run"]

Log = Mapping[str, float]
"""One log of a training: metrics by name, and `step`, the step after which it was written."""

DOCS = "docs/training_issues.md"
LOGS_KEPT = 12  # no rule looks further back

_SHORT, _LONG = 3, 10  # logs that a rule looks at: of a state, of a trend
_PARSE_CAUSES = {
    "invalid_json": "what stands in the call is no JSON",
    "unclosed": "the call is never closed",
    "missing_name": "the call names no tool",
    "unmarked": "the call stands there without its markers",
    "unknown_tool": "there is no tool of that name",
    "bad_arguments": "the arguments do not fit the schema",
}
_WORLD_CAUSES = ("timeout", "died")


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that goes wrong: its name, where it is explained, how many logs it takes to see it."""

    name: str
    section: str
    logs: int
    look: Callable[[Sequence[Log]], str | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that spoke, and after which step."""

    rule: str
    section: str
    step: int
    sentence: str

    @property
    def link(self) -> str:
        return f"{DOCS}#{self.section}"


def findings(logs: Sequence[Log], rules: Iterable[Rule] | None = None, *, at_end: bool = False) -> list[Finding]:
    """Return what the rules say of the last logs.

    A rule that has not seen enough of them is silent; at the end of a run it looks at what there
    is.
    """
    found = []
    trained = [log for log in logs if "reward" in log]
    for rule in RULES if rules is None else rules:
        enough = len(trained) >= rule.logs or (at_end and bool(trained) and rule.logs == _SHORT)
        said = rule.look(trained[-rule.logs :]) if enough else None
        if said is not None:
            found.append(Finding(rule.name, rule.section, int(trained[-1].get("step", 0)), said))
    return found


def over_run(logs: Sequence[Log]) -> dict[str, list[Finding]]:
    """Return by rule everything that was found after each log of a run."""
    trained = [log for log in logs if "reward" in log]
    by_rule: dict[str, list[Finding]] = {}
    for end in range(1, len(trained) + 1):
        for finding in findings(trained[max(0, end - LOGS_KEPT) : end], at_end=end == len(trained)):
            by_rule.setdefault(finding.rule, []).append(finding)
    return by_rule


# The rules, in the order in which they are told.


def _no_tool_calls(logs: Sequence[Log]) -> str | None:
    if not _tools(logs):
        return None  # no tool is offered
    calls, unmarked = _calls(logs), _total(logs, "tools/unmarked")
    episodes = _episodes(logs)
    if not episodes or calls - unmarked > 0.05 * episodes:
        return None
    said = f"no tool is called: {(calls - unmarked) / episodes:.2f} calls per episode {_span(logs)}"
    forms = Counter({form: _total(logs, f"answers/like_calls/{form}") for form in FORMS})
    written = [f"{FORMS[form]} ({count / len(logs):.3g})" for form, count in forms.most_common() if count]
    if written:
        like = forms.total() / len(logs)
        said += f"; {like:.3g} turns of a rollout look like calls in another form: {', '.join(written)}"
    return said


def _groups_all_failed(logs: Sequence[Log]) -> str | None:
    success = _mean(logs, "success")
    if not _groups_are_dead(logs) or success is None or success > 0.1:
        return None
    return (
        f"{_of_dead_groups(logs)}, and their episodes fail (success {success:.2f}), so nothing is learned{_why(logs)}"
    )


def _groups_all_solved(logs: Sequence[Log]) -> str | None:
    success = _mean(logs, "success")
    if not _groups_are_dead(logs) or success is None or success < 0.9:
        return None
    return (
        f"{_of_dead_groups(logs)}, because they are solved (success {success:.2f}): little is left to learn from "
        f"these rows"
    )


def _groups_all_alike(logs: Sequence[Log]) -> str | None:
    success = _mean(logs, "success")
    if not _groups_are_dead(logs) or success is None or not 0.1 < success < 0.9:
        return None
    return (
        f"{_of_dead_groups(logs)} at success {success:.2f}: the episodes of a group all succeed or all fail, "
        f"and nothing is learned"
    )


def _cut_by_length(logs: Sequence[Log]) -> str | None:
    by = _cut_shares(logs)
    if by is None or sum(by.values()) <= 0.5:
        return None
    return f"{_percent(sum(by.values()))} of the episodes {_span(logs)} are cut: {_listed(by)}"


def _tool_fails(logs: Sequence[Log]) -> str | None:
    worst = max(_tools(logs), key=lambda name: _share_failed(logs, name), default=None)
    if worst is None or _share_failed(logs, worst) < 0.5:
        return None
    return (
        f"the tool {worst} fails: {_percent(_share_failed(logs, worst))} of its calls {_span(logs)} (failures of all "
        f"tools a rollout: {_listed_causes(logs)})"
    )


def _tool_times_out(logs: Sequence[Log]) -> str | None:
    calls = _calls(logs)
    lost = {cause: _total(logs, f"tools/error/{cause}") for cause in _WORLD_CAUSES}
    if calls < 10 or sum(lost.values()) < 0.1 * calls:
        return None
    parts = " and ".join(f"{_percent(count / calls)} {_LOST[cause]}" for cause, count in lost.items() if count)
    slow = _last(logs, "tools/latency_p95")
    return (
        f"tools are lost or too slow: of the calls {_span(logs)}, {parts}"
        f"{'' if slow is None else f'; one call in twenty takes {slow:.1f} s or more'}"
    )


def _one_parse_error(logs: Sequence[Log]) -> str | None:
    calls = _calls(logs)
    errors = Counter({cause: _total(logs, f"tools/error/{cause}") for cause in _PARSE_CAUSES})
    cause, count = errors.most_common(1)[0]
    if not calls or count < 10 or errors.total() < 0.2 * calls or count < 0.7 * errors.total():
        return None
    return (
        f"{_percent(errors.total() / calls)} of the calls {_span(logs)} cannot be run, {_percent(count / errors.total())} "
        f"of those for one cause: {_PARSE_CAUSES[cause]} ({cause})"
    )


def _engine_differs(logs: Sequence[Log]) -> str | None:
    name = "sampling/sampling_logp_difference/mean"
    values = [log[name] for log in logs if name in log]
    if len(values) < len(logs) or min(values) <= 0.02:
        return None
    return (
        f"engine and trainer disagree: their log-probabilities of the same tokens differ by {values[-1]:.3f} on average "
        f"{_span(logs)} (below 0.01 is usual)"
    )


def _episodes_dropped(logs: Sequence[Log]) -> str | None:
    share = _mean(logs, "sampling/dropped_episodes")
    if share is None or share < 0.1:
        return None
    return (
        f"the correction for the engine drops {_percent(share)} of the episodes {_span(logs)} whole: their "
        f"log-probabilities in the engine and in the trainer are too far apart"
    )


def _entropy_collapses(logs: Sequence[Log]) -> str | None:
    values = [log["entropy"] for log in logs if "entropy" in log]
    success = _last(logs, "success")
    if len(values) < len(logs) or (success is not None and success >= 0.9):
        return None
    before, now = max(values[:3]), sum(values[-3:]) / 3
    if before <= 0 or now > 0.25 * before:
        return None
    return (
        f"the entropy collapses: from {before:.3g} to {now:.3g} {_span(logs)}, so the episodes of a group become alike"
    )


def _void_turns(logs: Sequence[Log]) -> str | None:
    share = _mean(logs, "turns/void")
    if share is None or share < 0.1:
        return None
    return f"{_percent(share)} of the turns {_span(logs)} hold neither a call nor an answer"


def _tool_never_used(logs: Sequence[Log]) -> str | None:
    calls = _calls(logs)
    unused = [name for name in _tools(logs) if not _total(logs, f"tools/{name}/calls")]
    if not unused or calls < 50:
        return None
    names = ", ".join(sorted(unused)[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
    per_rollout = calls / len(logs)
    return f"never called {_span(logs)}, in which a rollout has {per_rollout:.3g} calls: {names}"


def _reward_without_success(logs: Sequence[Log]) -> str | None:
    if any("success" not in log for log in logs):
        return None
    first, last = logs[:3], logs[-3:]
    reward, now = _mean(first, "reward"), _mean(last, "reward")
    success, success_now = _mean(first, "success"), _mean(last, "success")
    assert reward is not None and now is not None and success is not None and success_now is not None
    spread = _mean(first, "reward_std") or 0.0
    if now - reward < max(0.05, 0.5 * spread) or success_now - success > 0.02 or success_now >= 0.9:
        return None
    return (
        f"the reward rises from {reward:.2f} to {now:.2f} {_span(logs)}, while success goes from {success:.2f} to "
        f"{success_now:.2f}: something else than success is paid for"
    )


def _world_fails(logs: Sequence[Log]) -> str | None:
    share = _mean(logs, "world/failed_episodes")
    if share is None or share < 0.1:
        return None
    return f"the world fails in {_percent(share)} of the episodes {_span(logs)}: {_world_causes(logs)}"


RULES: tuple[Rule, ...] = (
    Rule("world_fails", "slow-tools", _SHORT, _world_fails),
    Rule("no_tool_calls", "the-model-does-not-call-tools", _SHORT, _no_tool_calls),
    Rule("groups_all_failed", "low-rewards-throughout", _SHORT, _groups_all_failed),
    Rule("groups_all_solved", "reward-collapse", _SHORT, _groups_all_solved),
    Rule("groups_all_alike", "entropy-collapse", _SHORT, _groups_all_alike),
    Rule("cut_by_length", "length-and-truncation", _SHORT, _cut_by_length),
    Rule("tool_fails", "slow-tools", _SHORT, _tool_fails),
    Rule("tool_times_out", "slow-tools", _SHORT, _tool_times_out),
    Rule("one_parse_error", "the-model-does-not-call-tools", _SHORT, _one_parse_error),
    Rule("engine_differs", "vllm-and-the-trainer-disagree", _SHORT, _engine_differs),
    Rule("episodes_dropped", "vllm-and-the-trainer-disagree", _SHORT, _episodes_dropped),
    Rule("void_turns", "length-and-truncation", _SHORT, _void_turns),
    Rule("entropy_collapses", "entropy-collapse", _LONG, _entropy_collapses),
    Rule("tool_never_used", "the-model-does-not-call-tools", _LONG, _tool_never_used),
    Rule("reward_without_success", "sparse-and-dense-rewards", _LONG, _reward_without_success),
)
"""Every rule, in the order in which they are told."""

_LOST = {"timeout": "overran their time", "died": "lost their process or server"}


# What the rules read.


def _mean(logs: Sequence[Log], name: str) -> float | None:
    values = [log[name] for log in logs if name in log]
    return sum(values) / len(values) if values else None


def _last(logs: Sequence[Log], name: str) -> float | None:
    return logs[-1].get(name)


def _total(logs: Sequence[Log], name: str) -> float:
    return sum(log.get(name, 0.0) for log in logs)


def _tools(logs: Sequence[Log]) -> list[str]:
    """Return the tools that are offered or were called, by the names in the metrics."""
    names = {name for log in logs for name in log if name.startswith("tools/") and name.endswith("/calls")}
    return sorted(name.removeprefix("tools/").removesuffix("/calls") for name in names)


def _calls(logs: Sequence[Log]) -> float:
    return sum(_total(logs, f"tools/{name}/calls") for name in _tools(logs))


def _episodes(logs: Sequence[Log]) -> float | None:
    """Return how many episodes there were: all sampled tokens, by the mean of an episode."""
    if any("rollout/sampled_tokens" not in log for log in logs):
        return None
    return sum(
        log["rollout/sampled_tokens"] / log["completions/mean_length"]
        for log in logs
        if log.get("completions/mean_length")
    )


def _share_failed(logs: Sequence[Log], tool: str) -> float:
    calls = _total(logs, f"tools/{tool}/calls")
    return _total(logs, f"tools/{tool}/failures") / calls if calls >= 10 else 0.0


def _groups_are_dead(logs: Sequence[Log]) -> bool:
    return all(log.get("reward/groups_without_spread", 0.0) >= 0.9 for log in logs)


def _of_dead_groups(logs: Sequence[Log]) -> str:
    share = _mean(logs, "reward/groups_without_spread") or 0.0
    whole = "no group differs" if share >= 1.0 else f"{_percent(share)} of the groups do not differ"
    return f"{whole} in reward {_span(logs)}"


def _why(logs: Sequence[Log]) -> str:
    """Return what is known of why episodes fail, to be added to a sentence."""
    reasons = []
    by = _cut_shares(logs) or {}
    if sum(by.values()) > 0.3:
        reasons.append(f"{_percent(sum(by.values()))} of the episodes are cut, {_listed(by)}")
    if _tools(logs) and _calls(logs) == 0:
        reasons.append("no tool is called")
    elif _total(logs, "tools/failure_frequency") > 0.5 * len(logs):
        reasons.append(f"{_percent(_mean(logs, 'tools/failure_frequency') or 0.0)} of the tool calls fail")
    return f": {'; '.join(reasons)}" if reasons else ""


def _cut_shares(logs: Sequence[Log]) -> dict[str, float] | None:
    """Return which share of the episodes each limit has cut."""
    length, context = _mean(logs, "stop/length"), _mean(logs, "stop/context_full")
    if length is None or context is None:
        return None
    by_turn = _mean(logs, "stop/length_of_turn") or 0.0
    return {
        "max_turn_tokens": by_turn,
        "max_completion_length": max(0.0, length - by_turn),
        "the context window (vllm_max_model_length)": context,
    }


def _listed(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{_percent(share)} by {name}" for name, share in ordered if share >= 0.005)


def _listed_causes(logs: Sequence[Log]) -> str:
    names = {name for log in logs for name in log if name.startswith("tools/error/")}
    counts = Counter({name.rpartition("/")[2]: _total(logs, name) for name in names})
    return ", ".join(f"{cause} {count / len(logs):.3g}" for cause, count in counts.most_common(3) if count)


def _world_causes(logs: Sequence[Log]) -> str:
    engine = _mean(logs, "stop/engine_failure") or 0.0
    parts = [f"{_percent(engine)} lost by the engine"] if engine else []
    parts += [
        f"{_total(logs, f'tools/error/{cause}') / len(logs):.3g} calls a rollout {_LOST[cause]}"
        for cause in _WORLD_CAUSES
        if _total(logs, f"tools/error/{cause}")
    ]
    return ", ".join(parts) or "see tools.log"


def _span(logs: Sequence[Log]) -> str:
    if "step" not in logs[-1]:
        return f"in {len(logs)} logs"
    first, last = int(logs[0].get("step", 0)), int(logs[-1]["step"])
    return f"at step {last}" if first == last else f"in steps {first} to {last}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
