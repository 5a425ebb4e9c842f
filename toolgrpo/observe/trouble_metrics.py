"""Numbers that tell what goes wrong: which limit cuts episodes, what the world did to them, and what
the model writes where it should call a tool.

`docs/training_issues.md` says what is healthy, `doctor.py` says it of a run. Every name is there in
every batch, so that a mean over several of them is one; but of more than `EACH_TOOL` tools only
those have metrics that were called.

Not covered: metrics that need no knowledge of the run's tools and limits (`metrics.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from toolgrpo.calls import ToolErrorKind
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes
from toolgrpo.observe.log_reading import NO_TOOL
from toolgrpo.observe.metric import Metric, Metrics
from toolgrpo.observe.metrics import tool_called
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.trajectory import StopReason, Trajectory

EACH_TOOL = 32
"""Of so many tools each has metrics in every batch; a catalogue of hundreds would bury all others."""
WORLD_CAUSES = (ToolErrorKind.TIMEOUT, ToolErrorKind.DIED)


def trouble_metrics(trajectories: Sequence[Trajectory], tools: Sequence[str], limits: EpisodeLimits) -> Metrics:
    """Return the metrics of these episodes, which were offered these tools within these limits."""
    n = max(1, len(trajectories))
    metrics = {
        "stop/length_of_turn": Metric(sum(cut_in_turn(t, limits) for t in trajectories) / n),
        "world/failed_episodes": Metric(sum(map(failed_by_world, trajectories)) / n),
    }
    if limits.context is not None:
        metrics["context/segments"] = Metric(sum(len(t.segment_starts) + 1 for t in trajectories) / n)
    if not tools:
        return metrics
    results = [result for trajectory in trajectories for result in trajectory.results]
    like_calls = count_lookalikes(trajectories, tools)
    for name in tools if len(tools) <= EACH_TOOL else (NO_TOOL,):
        own = [result for result in results if tool_called(result) == name]
        metrics[f"tools/{name}/calls"] = Metric(float(len(own)), sum)
        metrics[f"tools/{name}/failures"] = Metric(float(sum(not result.ok for result in own)), sum)
    for cause in ToolErrorKind:
        metrics[f"tools/error/{cause}"] = Metric(float(sum(result.error is cause for result in results)), sum)
    return metrics | {f"answers/like_calls/{form}": Metric(float(like_calls[form]), sum) for form in FORMS}


def cut_in_turn(trajectory: Trajectory, limits: EpisodeLimits) -> bool:
    """Return whether the cap of a single turn ended the episode, with room left in the episode."""
    cap = limits.max_turn_tokens
    if cap is None or trajectory.stop_reason is not StopReason.LENGTH or not trajectory.turns:
        return False
    last = trajectory.turns[-1]
    return (
        not last.closed
        and last.end - last.start >= cap
        and trajectory.n_sampled + trajectory.n_context < limits.max_completion_length
    )


def failed_by_world(trajectory: Trajectory) -> bool:
    """Return whether the engine lost the episode, or a tool of it was lost or too slow."""
    return trajectory.stop_reason is StopReason.ENGINE_FAILURE or any(
        result.error in WORLD_CAUSES for result in trajectory.results
    )
