"""What agents did behind the gateway, as numbers for the log; nothing where our own loop played."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from toolgrpo.observe.metric import Metric, Metrics
from toolgrpo.trajectory import Trajectory


def agent_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return requests and segments an episode, forks by their reasons, and the numbers that agents returned."""
    played = [one for one in trajectories if "gateway" in one.metadata]
    if not played:
        return {}
    counts = [one.metadata["gateway"] for one in played]
    forks = sum((Counter(count["forks"]) for count in counts), Counter[str]())
    returned: dict[str, list[float]] = defaultdict(list)
    for one in played:
        for name, value in one.metadata.get("agent", {}).items():
            returned[name].append(value)
    return {
        "gateway/requests": Metric(sum(count["requests"] for count in counts) / len(played)),
        "gateway/segments": Metric(sum(1 + len(one.segment_starts) for one in played) / len(played)),
        "gateway/disconnected": Metric(float(sum(count["disconnected"] for count in counts)), sum),
        **{f"gateway/forks/{reason}": Metric(float(number), sum) for reason, number in forks.items()},
        **{f"agent/{name}": Metric(sum(values) / len(values)) for name, values in returned.items()},
    }
