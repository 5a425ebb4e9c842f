"""Numbers for the log, derived from trajectories. Nothing reads them back: the trajectories are the source of truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolgrpo.trajectory import AttemptStatus, StopReason, ToolResult, Trajectory

__all__ = ["rollout_metrics", "tool_metrics"]


def rollout_metrics(trajectories: Sequence[Trajectory], *, duration_s: float, engine_idle_s: float) -> dict[str, float]:
    """Metrics of one rollout. The names under `completions/` are TRL's own."""
    n = len(trajectories)
    sampled = [t.n_sampled for t in trajectories]
    finished = [t.n_sampled for t in trajectories if t.stop_reason in (StopReason.FINISHED, StopReason.STOP_TOOL)]
    stops = Counter(t.stop_reason for t in trajectories)
    metrics = {
        "completions/mean_length": sum(sampled) / n,
        "completions/min_length": float(min(sampled)),
        "completions/max_length": float(max(sampled)),
        "completions/clipped_ratio": 1 - len(finished) / n,
        "completions/mean_terminated_length": sum(finished) / len(finished) if finished else 0.0,
        "rollout/turns": sum(len(t.turns) for t in trajectories) / n,
        "rollout/sampled_tokens": float(sum(sampled)),
        "rollout/context_tokens": float(sum(t.n_context for t in trajectories)),
        "rollout/seconds": duration_s,
        "rollout/engine_idle_share": engine_idle_s / duration_s if duration_s > 0 else 0.0,
    }
    metrics.update({f"stop/{reason}": stops[reason] / n for reason in StopReason})
    metrics.update(tool_metrics([result for t in trajectories for result in t.results], n))
    unmarked = sum(attempt.status is AttemptStatus.UNMARKED for t in trajectories for attempt in t.attempts)
    metrics["tools/unmarked"] = float(unmarked)  # answered or run, as `unmarked_calls` says
    return metrics


def tool_metrics(results: Sequence[ToolResult], n_episodes: int) -> dict[str, float]:
    """Calls and failures, per tool and by cause, and latency percentiles."""
    calls = len(results)
    failures = [r for r in results if not r.ok]
    metrics = {
        "tools/call_frequency": calls / n_episodes,
        "tools/failure_frequency": len(failures) / calls if calls else 0.0,
        "tools/truncated": float(sum(r.truncated for r in results)),
        "tools/cached": float(sum(r.cached for r in results)),
    }
    for name, count in Counter(r.name or "unnamed" for r in results).items():
        metrics[f"tools/{name}/calls"] = float(count)
        metrics[f"tools/{name}/failures"] = float(sum((r.name or "unnamed") == name for r in failures))
    for cause, count in Counter(r.error for r in failures if r.error is not None).items():
        metrics[f"tools/error/{cause}"] = float(count)
    latencies = sorted(r.duration_s for r in results)
    if latencies:
        metrics["tools/latency_p50"] = _quantile(latencies, 0.5)
        metrics["tools/latency_p95"] = _quantile(latencies, 0.95)
    return metrics


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
