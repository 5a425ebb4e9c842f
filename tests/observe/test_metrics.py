from __future__ import annotations

from toolgrpo.observe.metrics import rollout_metrics, tool_metrics
from toolgrpo.trajectory import Ledger, StopReason, ToolErrorKind, ToolResult, Trajectory, Turn


def trajectory(sampled: int, context: int, results: tuple[ToolResult, ...], reason: StopReason) -> Trajectory:
    ledger = Ledger([1, 2, 3])
    ledger.sampled([5] * sampled, [-1.0] * sampled)
    ledger.context([6] * context)
    ledger.turn(Turn(start=0, end=sampled, content="", reasoning=None, results=results))
    return ledger.finish(reason)


def test_rollout_metrics_count_what_is_in_the_trajectories() -> None:
    good = ToolResult("3", "add", duration_s=0.5)
    bad = ToolResult("?", "add", ToolErrorKind.TIMEOUT, duration_s=2.0, left_out=7)
    odd = ToolResult("?", None, ToolErrorKind.INVALID_JSON)
    metrics = rollout_metrics(
        [
            trajectory(4, 2, (good, bad), StopReason.FINISHED),
            trajectory(8, 0, (odd,), StopReason.LENGTH),
        ],
        duration_s=4.0,
        engine_idle_s=1.0,
    )
    assert metrics["completions/mean_length"] == 6 and metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rollout/sampled_tokens"] == 12 and metrics["rollout/context_tokens"] == 2
    assert metrics["rollout/engine_idle_share"] == 0.25
    assert metrics["stop/finished"] == 0.5 and metrics["stop/length"] == 0.5 and metrics["stop/deadline"] == 0
    assert metrics["tools/call_frequency"] == 1.5 and metrics["tools/failure_frequency"] == 2 / 3
    assert metrics["tools/add/calls"] == 2 and metrics["tools/add/failures"] == 1
    assert metrics["tools/unnamed/failures"] == 1
    assert metrics["tools/error/timeout"] == 1 and metrics["tools/error/invalid_json"] == 1
    assert metrics["tools/truncated"] == 1
    assert metrics["tools/latency_p50"] == 0.5 and metrics["tools/latency_p95"] == 2.0


def test_no_calls_no_latencies() -> None:
    metrics = tool_metrics([], n_episodes=3)
    assert metrics["tools/failure_frequency"] == 0 and "tools/latency_p50" not in metrics
