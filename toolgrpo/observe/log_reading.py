"""Read numbers out of the logs of a training, for the rules of the doctor.

Pure functions of the last few logs. A metric that is missing is None, or 0 where it is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NO_NAME = "unnamed"
"""What metrics call the tool of a call whose name could not be read."""

NO_TOOL = "unknown"
"""What metrics call the tool of a call that names one that there is not: a model makes up any number."""

Log = Mapping[str, float]
"""One log of a training: metrics by name, and `step`, the step after which it was written."""


def mean_of(logs: Sequence[Log], name: str) -> float | None:
    values = [log[name] for log in logs if name in log]
    return sum(values) / len(values) if values else None


def trend_of(logs: Sequence[Log], *names: str) -> list[tuple[float, float]] | None:
    """Return the means of each metric at the beginning and at the end; None where one of them is missing in a log."""
    if any(name not in log for log in logs for name in names):
        return None
    return [(mean_of(logs[:3], name) or 0.0, mean_of(logs[-3:], name) or 0.0) for name in names]


def last_of(logs: Sequence[Log], name: str) -> float | None:
    return logs[-1].get(name)


def total_of(logs: Sequence[Log], name: str) -> float:
    return sum(log.get(name, 0.0) for log in logs)


def tools_in(logs: Sequence[Log]) -> list[str]:
    """Return the tools that are offered or were called, by the names in the metrics."""
    names = {name for log in logs for name in log if name.startswith("tools/") and name.endswith("/calls")}
    return sorted(name.removeprefix("tools/").removesuffix("/calls") for name in names)


def named_tools_in(logs: Sequence[Log]) -> list[str]:
    """Return those of them that there are: calls of no tool, or of one that is made up, are another matter."""
    return [name for name in tools_in(logs) if name not in (NO_NAME, NO_TOOL)]


def calls_in(logs: Sequence[Log]) -> float:
    return sum(total_of(logs, f"tools/{name}/calls") for name in tools_in(logs))


def episodes_in(logs: Sequence[Log]) -> float | None:
    """Return how many episodes there were: all sampled tokens, by the mean of an episode."""
    if any("rollout/sampled_tokens" not in log for log in logs):
        return None
    return sum(
        log["rollout/sampled_tokens"] / log["completions/mean_length"]
        for log in logs
        if log.get("completions/mean_length")
    )


def span_of(logs: Sequence[Log]) -> str:
    if "step" not in logs[-1]:
        return f"in {len(logs)} logs"
    first, last = int(logs[0].get("step", 0)), int(logs[-1]["step"])
    return f"at step {last}" if first == last else f"in steps {first} to {last}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def cut_shares(logs: Sequence[Log]) -> dict[str, float] | None:
    """Return which share of the episodes each limit has cut."""
    length, context = mean_of(logs, "stop/length"), mean_of(logs, "stop/context_full")
    if length is None or context is None:
        return None
    by_turn = mean_of(logs, "stop/length_of_turn") or 0.0
    return {
        "max_turn_tokens": by_turn,
        "max_completion_length": max(0.0, length - by_turn),
        "the context window (vllm_max_model_length)": context,
    }


def listed(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{percent(share)} by {name}" for name, share in ordered if share >= 0.005)
