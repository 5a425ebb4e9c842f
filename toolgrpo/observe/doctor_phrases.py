"""What several rules of the doctor ask of the logs, and say with the same words (`doctor.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolgrpo.observe.log_reading import (
    Log,
    calls_in,
    cut_shares,
    listed,
    mean_of,
    percent,
    span_of,
    tools_in,
    total_of,
)

WORLD_CAUSES = ("timeout", "died")
LOST = {"timeout": "overran their time", "died": "lost their process or server"}


def share_failed(logs: Sequence[Log], tool: str) -> float:
    calls = total_of(logs, f"tools/{tool}/calls")
    return total_of(logs, f"tools/{tool}/failures") / calls if calls >= 10 else 0.0


def groups_are_dead(logs: Sequence[Log]) -> bool:
    return all(log.get("reward/groups_without_spread", 0.0) >= 0.9 for log in logs)


def of_dead_groups(logs: Sequence[Log]) -> str:
    share = mean_of(logs, "reward/groups_without_spread") or 0.0
    whole = "no group differs" if share >= 1.0 else f"{percent(share)} of the groups do not differ"
    return f"{whole} in reward {span_of(logs)}"


def why_failed(logs: Sequence[Log]) -> str:
    """Return what is known of why episodes fail, to be added to a sentence."""
    reasons = []
    by = cut_shares(logs) or {}
    if sum(by.values()) > 0.3:
        reasons.append(f"{percent(sum(by.values()))} of the episodes are cut, {listed(by)}")
    if tools_in(logs) and calls_in(logs) == 0:
        reasons.append("no tool is called")
    elif total_of(logs, "tools/failure_frequency") > 0.5 * len(logs):
        reasons.append(f"{percent(mean_of(logs, 'tools/failure_frequency') or 0.0)} of the tool calls fail")
    return f": {'; '.join(reasons)}" if reasons else ""


def listed_causes(logs: Sequence[Log]) -> str:
    names = {name for log in logs for name in log if name.startswith("tools/error/")}
    counts = Counter({name.rpartition("/")[2]: total_of(logs, name) for name in names})
    return ", ".join(f"{cause} {count / len(logs):.3g}" for cause, count in counts.most_common(3) if count)


def world_causes(logs: Sequence[Log]) -> str:
    engine = mean_of(logs, "stop/engine_failure") or 0.0
    parts = [f"{percent(engine)} lost by the engine"] if engine else []
    parts += [
        f"{total_of(logs, f'tools/error/{cause}') / len(logs):.3g} of the calls in a rollout {LOST[cause]}"
        for cause in WORLD_CAUSES
        if total_of(logs, f"tools/error/{cause}")
    ]
    return ", ".join(parts) or "see tools.log"
