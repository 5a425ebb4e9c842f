"""What a person finds out about a run a day later, said in one sentence when it begins.

`RULES` is the table: each rule is a pure function of the last few logs of a run (what TRL logs, as
`trainer_state.json` keeps it) and returns its sentence, with the numbers in it, or None. Each names
the section of docs/how-to/troubleshooting.md that goes on from there. `findings` asks all of them;
`over_run` asks them at every log of a run that is over.

Invariants: a rule is silent where a metric that it needs is missing; it never raises; it looks at
nothing but the logs.

Not covered: who hears of it and how often (`watch.py`); the episodes themselves (`report`, `show`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolgrpo.observe.call_lookalikes import FORMS
from toolgrpo.observe.doctor_phrases import (
    LOST,
    WORLD_CAUSES,
    groups_are_dead,
    listed_causes,
    of_dead_groups,
    share_failed,
    why_failed,
    world_causes,
)
from toolgrpo.observe.log_reading import (
    Log,
    calls_in,
    cut_shares,
    episodes_in,
    last_of,
    listed,
    mean_of,
    named_tools_in,
    percent,
    span_of,
    tools_in,
    total_of,
    trend_of,
)

DOCS = "docs/how-to/troubleshooting.md"
LOGS_KEPT = 12  # no rule looks further back

_SHORT, _LONG = 3, 10  # logs that a rule looks at: of a state, of a trend
_SWAY = 0.1  # by which the success of a few batches differs with the questions that were drawn
_PARSE_CAUSES = {
    "invalid_json": "what stands in the call is no JSON",
    "unclosed": "the call is never closed",
    "missing_name": "the call names no tool",
    "unmarked": "the call stands there without its markers",
    "unknown_tool": "there is no tool of that name",
    "bad_arguments": "the arguments do not fit the schema",
}


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

    @property
    def link_here(self) -> str:
        return page_here(self.section)


def pages_folder() -> Path:
    """Return the folder of the pages on this machine: the wheel has them as `toolgrpo/pages`, a clone as `docs`."""
    packed = Path(__file__).parents[1] / "pages"
    return packed if packed.is_dir() else Path(__file__).parents[2] / "docs"


def page_here(section: str = "", page: str = DOCS) -> str:
    """Return the path of a page, and a section of it, as it is reached from the working folder."""
    path = pages_folder() / Path(page).relative_to("docs")
    shown = page if path == Path.cwd() / page else str(path)
    return f"{shown}#{section}" if section else shown


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


def over_run(logs: Iterable[Log]) -> Iterator[Finding]:
    """Yield what was found after each log of a run that is over; the last few logs are kept, no more."""
    trained = (log for log in logs if "reward" in log)
    last: deque[Log] = deque(maxlen=LOGS_KEPT)
    following = next(trained, None)
    while following is not None:
        last.append(following)
        following = next(trained, None)
        yield from findings(list(last), at_end=following is None)


def why_broken(errors: Mapping[str, float], calls: float) -> str | None:
    """Return why calls cannot be run, to be added to a sentence, where so many cannot that it matters.

    `errors` counts calls by cause; causes that are none of the form are passed over.
    """
    counts = Counter({cause: errors.get(cause, 0) for cause in _PARSE_CAUSES})
    broken, (cause, count) = counts.total(), counts.most_common(1)[0]
    if not calls or broken < 10:
        return None
    if broken >= 0.2 * calls and count >= 0.7 * broken:
        return f", most of them for one cause: {_PARSE_CAUSES[cause]}"
    if broken < 0.4 * calls:
        return None
    return ": the model does not know the form of calls yet, which `toolgrpo sft` teaches"


# The rules, in the order in which they are told.


def _no_tool_calls(logs: Sequence[Log]) -> str | None:
    if not tools_in(logs):
        return None  # no tool is offered
    calls = calls_in(logs) - total_of(logs, "tools/error/unmarked")  # those are answered, and not run
    episodes = episodes_in(logs)
    if not episodes or calls > 0.05 * episodes:
        return None
    said = f"no tool is called: {calls / episodes:.2f} calls per episode {span_of(logs)}"
    forms = Counter({form: total_of(logs, f"answers/like_calls/{form}") for form in FORMS})
    written = [f"{FORMS[form]} ({count / len(logs):.3g})" for form, count in forms.most_common() if count]
    if written:
        like = forms.total() / len(logs)
        said += f"; {like:.3g} turns of a rollout look like calls in another form: {', '.join(written)}"
    return said


def _groups_all_failed(logs: Sequence[Log]) -> str | None:
    success = mean_of(logs, "success")
    if not groups_are_dead(logs) or success is None or success > 0.1:
        return None
    return f"{of_dead_groups(logs)}, and their episodes fail (success {success:.2f}), so nothing is learned{why_failed(logs)}"


def _groups_all_solved(logs: Sequence[Log]) -> str | None:
    success = mean_of(logs, "success")
    if not groups_are_dead(logs) or success is None or success < 0.9:
        return None
    return (
        f"{of_dead_groups(logs)}, because they are solved (success {success:.2f}): little is left to learn from "
        f"these rows"
    )


def _groups_all_alike(logs: Sequence[Log]) -> str | None:
    success = mean_of(logs, "success")
    if not groups_are_dead(logs) or success is None or not 0.1 < success < 0.9:
        return None
    return (
        f"{of_dead_groups(logs)} at success {success:.2f}: the episodes of a group all succeed or all fail, "
        f"and nothing is learned"
    )


def _broken_calls(logs: Sequence[Log]) -> str | None:
    calls = calls_in(logs)
    errors = Counter({cause: total_of(logs, f"tools/error/{cause}") for cause in _PARSE_CAUSES})
    why = why_broken(errors, calls)
    if why is None:
        return None
    by = ", ".join(f"{name} {percent(n / calls)}" for name, n in errors.most_common() if n >= 0.005 * calls)
    return f"{percent(errors.total() / calls)} of the calls {span_of(logs)} cannot be run ({by}){why}"


def _cut_by_length(logs: Sequence[Log]) -> str | None:
    by = cut_shares(logs)
    if by is None or sum(by.values()) <= 0.5:
        return None
    return f"{percent(sum(by.values()))} of the episodes {span_of(logs)} are cut: {listed(by)}"


def _tool_fails(logs: Sequence[Log]) -> str | None:
    worst = max(named_tools_in(logs), key=lambda name: share_failed(logs, name), default=None)
    if worst is None or share_failed(logs, worst) < 0.5:
        return None
    return (
        f"the tool {worst} fails: {percent(share_failed(logs, worst))} of its calls {span_of(logs)} (failures of all "
        f"tools a rollout: {listed_causes(logs)})"
    )


def _tool_times_out(logs: Sequence[Log]) -> str | None:
    calls = calls_in(logs)
    lost = {cause: total_of(logs, f"tools/error/{cause}") for cause in WORLD_CAUSES}
    if calls < 10 or sum(lost.values()) < 0.1 * calls:
        return None
    parts = " and ".join(f"{percent(count / calls)} {LOST[cause]}" for cause, count in lost.items() if count)
    slow = last_of(logs, "tools/latency_p95")
    return (
        f"tools are lost or too slow: of the calls {span_of(logs)}, {parts}"
        f"{'' if slow is None else f'; one call in twenty takes {slow:.1f} s or more'}"
    )


def _engine_differs(logs: Sequence[Log]) -> str | None:
    name = "sampling/sampling_logp_difference/mean"
    values = [log[name] for log in logs if name in log]
    if len(values) < len(logs) or min(values) <= 0.02:
        return None
    return (
        f"engine and trainer disagree: their log-probabilities of the same tokens differ by {values[-1]:.3f} on average "
        f"{span_of(logs)} (below 0.01 is usual)"
    )


def _engine_draws_oddly(logs: Sequence[Log]) -> str | None:
    surprise, entropy = mean_of(logs, "sampling/surprise"), mean_of(logs, "entropy")
    if surprise is None or entropy is None or surprise <= 2.0 + 3.0 * entropy:
        return None
    return (
        f"the engine draws tokens that it calls improbable itself: {surprise:.1f} nats a token {span_of(logs)}, where "
        f"{entropy:.2g} would follow from its distribution; what is drawn is not what the model says"
    )


def _episodes_dropped(logs: Sequence[Log]) -> str | None:
    share = mean_of(logs, "sampling/dropped_episodes")
    if share is None or share < 0.1:
        return None
    return (
        f"the correction for the engine drops {percent(share)} of the episodes {span_of(logs)} whole: their "
        f"log-probabilities in the engine and in the trainer are too far apart"
    )


def _lengths_weighted_unlike(logs: Sequence[Log]) -> str | None:
    masked, ess = (
        [mean_of(logs, f"correction/{name}/{quarter}") for quarter in ("q1", "q4")]
        for name in ("masked_episodes", "ess")
    )
    if None in masked or None in ess:
        return None
    short, long = (share or 0.0 for share in masked)
    if abs(long - short) >= 0.1:
        return (
            f"the correction for the engine chooses by length: it leaves out {percent(long)} of the longest quarter of "
            f"the episodes {span_of(logs)} and {percent(short)} of the shortest (rollout_correction)"
        )
    of_short, of_long = (share or 0.0 for share in ess)
    if of_long > 0.5 or of_long > 0.7 * of_short:
        return None
    return (
        f"the correction for the engine makes long episodes noise: the weights of the longest quarter {span_of(logs)} "
        f"leave {percent(of_long)} of their tokens' effect, those of the shortest {percent(of_short)} (rollout_correction)"
    )


def _entropy_collapses(logs: Sequence[Log]) -> str | None:
    values = [log["entropy"] for log in logs if "entropy" in log]
    success = last_of(logs, "success")
    if len(values) < len(logs) or (success is not None and success >= 0.9):
        return None
    before, now = max(values[:3]), sum(values[-3:]) / 3
    if before <= 0 or now > 0.25 * before:
        return None
    return f"the entropy collapses: from {before:.3g} to {now:.3g} {span_of(logs)}, so the episodes of a group become alike"


def _void_turns(logs: Sequence[Log]) -> str | None:
    share = mean_of(logs, "turns/void")
    if share is None or share < 0.1:
        return None
    return f"{percent(share)} of the turns {span_of(logs)} hold no call that can be read and no answer"


def _tool_never_used(logs: Sequence[Log]) -> str | None:
    calls = calls_in(logs)
    unused = [name for name in named_tools_in(logs) if not total_of(logs, f"tools/{name}/calls")]
    if not unused or calls < 50:
        return None
    names = ", ".join(sorted(unused)[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
    per_rollout = calls / len(logs)
    return f"never called {span_of(logs)}, in which a rollout has {per_rollout:.3g} calls: {names}"


def _calls_given_up(logs: Sequence[Log]) -> str | None:
    trend = trend_of(logs, "tools/call_frequency", "success")
    if trend is None:
        return None
    (calls, calls_now), (success, success_now) = trend
    if calls < 0.5 or not 0.05 < calls_now <= 0.7 * calls or success_now - success > _SWAY or success_now >= 0.9:
        return None
    return (
        f"calls are given up: an episode has {calls_now:.2f} of them, and had {calls:.2f}, {span_of(logs)}, while success "
        f"goes from {success:.2f} to {success_now:.2f}"
    )


def _reward_without_success(logs: Sequence[Log]) -> str | None:
    trend = trend_of(logs, "reward", "success")
    if trend is None:
        return None
    (reward, now), (success, success_now) = trend
    spread = mean_of(logs[:3], "reward_std") or 0.0
    if now - reward < max(0.05, 0.5 * spread) or success_now - success > 0.02 or success_now >= 0.9:
        return None
    return (
        f"the reward rises from {reward:.2f} to {now:.2f} {span_of(logs)}, while success goes from {success:.2f} to "
        f"{success_now:.2f}: something else than success is paid for"
    )


def _world_fails(logs: Sequence[Log]) -> str | None:
    share = mean_of(logs, "world/failed_episodes")
    if share is None or share < 0.1:
        return None
    return f"the world fails in {percent(share)} of the episodes {span_of(logs)}: {world_causes(logs)}"


RULES: tuple[Rule, ...] = (
    Rule("world_fails", "slow-tools", _SHORT, _world_fails),
    Rule("no_tool_calls", "the-model-does-not-call-tools", _SHORT, _no_tool_calls),
    Rule("groups_all_failed", "low-rewards-throughout", _SHORT, _groups_all_failed),
    Rule("groups_all_solved", "reward-collapse", _SHORT, _groups_all_solved),
    Rule("groups_all_alike", "entropy-collapse", _SHORT, _groups_all_alike),
    Rule("broken_calls", "calls-that-fail", _SHORT, _broken_calls),
    Rule("cut_by_length", "length-and-truncation", _SHORT, _cut_by_length),
    Rule("tool_fails", "calls-that-fail", _SHORT, _tool_fails),
    Rule("tool_times_out", "slow-tools", _SHORT, _tool_times_out),
    Rule("engine_differs", "vllm-and-the-trainer-disagree", _SHORT, _engine_differs),
    Rule("engine_draws_oddly", "vllm-and-the-trainer-disagree", _SHORT, _engine_draws_oddly),
    Rule("episodes_dropped", "vllm-and-the-trainer-disagree", _SHORT, _episodes_dropped),
    Rule("lengths_weighted_unlike", "vllm-and-the-trainer-disagree", _SHORT, _lengths_weighted_unlike),
    Rule("void_turns", "length-and-truncation", _SHORT, _void_turns),
    Rule("entropy_collapses", "entropy-collapse", _LONG, _entropy_collapses),
    Rule("tool_never_used", "the-model-does-not-call-tools", _LONG, _tool_never_used),
    Rule("calls_given_up", "the-model-does-not-call-tools", _LONG, _calls_given_up),
    Rule("reward_without_success", "sparse-and-dense-rewards", _LONG, _reward_without_success),
)
"""Every rule, in the order in which they are told."""
