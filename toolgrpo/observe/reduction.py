"""Rollout metrics of all processes as one: each process runs episodes of its own, and TRL logs the main one's numbers.

Counts are added up, bounds and the time taken are those of the extreme process, everything else (shares and means, of
equally many episodes in each process) is averaged over the processes that have it. Not exact, but near: the latency
percentiles, `tools/failure_frequency` and `completions/mean_terminated_length`, which are averages of averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from accelerate.utils import gather_object

__all__ = ["merged", "of_all_processes"]

_COUNTS = ("rollout/sampled_tokens", "rollout/context_tokens", "tools/truncated", "tools/cached")


def of_all_processes(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one rollout over all processes. Every process must call it."""
    return merged(gather_object([dict(metrics)]))


def merged(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value per name that any part has."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: _reduction(name)([part[name] for part in parts if name in part]) for name in names}


def _reduction(name: str) -> Callable[[Sequence[float]], float]:
    if name in _COUNTS or name.startswith("tools/error/") or name.endswith(("/calls", "/failures")):
        return sum
    if name == "completions/min_length":
        return min
    if name in ("completions/max_length", "rollout/seconds"):
        return max
    return _mean


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
