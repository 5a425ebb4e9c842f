"""Numbers for the log, derived from a batch.

Nothing reads them back: the trajectories are the source of truth.

Each process runs episodes of its own, and TRL logs the main one's numbers. So each metric says how
the values of several processes become one: counts are added up, bounds and the time taken are those
of the extreme process, and a share or a mean weighs as much as it has episodes, calls or tokens
behind it, so that it is that of all of them. Only the latency percentiles are near and not exact.

`reward` (mean) and `reward_std` are logged by TRL. What is added tells early that GRPO has nothing
to learn from: the smallest and largest reward, and the share of groups whose rewards are all alike.
What alike means stands in `learning/advantages.py`; the standard deviation of equal fp32 rewards is
seldom exactly 0, so that TRL's `frac_reward_zero_std` misses most such groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from accelerate.utils import gather_object

from toolgrpo.engines.base import CacheRoom
from toolgrpo.episode.tool_calls import INFRASTRUCTURE_CAUSES, NO_TOOL, WITHOUT_MARKERS, ToolErrorKind
from toolgrpo.episode.trajectory import StopReason, Trajectory, copies_result, is_void
from toolgrpo.learning.advantages import Shaping, is_dead, members_of
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes
from toolgrpo.rollout.batch import RolloutBatch
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.rollout.observers import Observer
from toolgrpo.rollout.row_parts import may_call

EACH_TOOL = 32
"""Up to so many tools have metrics in every batch; of a larger catalogue only those that were called."""


class Metric(NamedTuple):
    """A number, and how those of several processes become one: as a mean of `n` things each, or otherwise."""

    value: float
    over_processes: Callable[[Iterable[float]], float] | None = None
    n: int = 1


Metrics = dict[str, Metric]


def mean(total: float, n: int) -> Metric:
    """Return the mean of so many things, 0 if there are none."""
    return Metric(total / n if n else 0.0, n=n)


@dataclass(frozen=True, slots=True)
class Known:
    """The tools that a run offers, its limits, and the cache of its engine.

    The metrics of tools, causes and limits that it knows are there in every batch.
    """

    tools: Sequence[str]
    limits: EpisodeLimits
    cache: CacheRoom | None = None


def limit_metrics(trajectories: Sequence[Trajectory], limits: EpisodeLimits) -> Metrics:
    """Return which of the limits cut episodes."""
    n = len(trajectories)
    found = {"stop/length_of_turn": mean(sum(cut_in_turn(t, limits) for t in trajectories), n)}
    if limits.context is not None:
        found["context/segments"] = mean(sum(len(t.segment_starts) + 1 for t in trajectories), n)
    return found


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


def failed_by_infrastructure(trajectory: Trajectory) -> bool:
    """Return whether the engine lost the episode, or a tool of it was lost or too slow."""
    return trajectory.stop_reason is StopReason.ENGINE_FAILURE or any(
        result.error in INFRASTRUCTURE_CAUSES for result in trajectory.results
    )


# What agents did behind the gateway, as numbers for the log; nothing where our own loop played.


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
        "gateway/requests": mean(sum(count["requests"] for count in counts), len(played)),
        "gateway/segments": mean(sum(1 + len(one.segment_starts) for one in played), len(played)),
        "gateway/disconnected": Metric(float(sum(count["disconnected"] for count in counts)), sum),
        **{f"gateway/forks/{reason}": Metric(float(number), sum) for reason, number in forks.items()},
        **{f"agent/{name}": mean(sum(values), len(values)) for name, values in returned.items()},
    }


class MetricsLog(Observer):
    """Logs the metrics of each batch that is trained on or evaluated, over all processes:
    each of them must hear of it.
    """

    def __init__(
        self,
        log: Callable[[Mapping[str, float]], None],
        known: Known | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        self._log = log
        self._known = known
        self._shaping = shaping or Shaping()

    def batch_done(self, batch: RolloutBatch) -> None:
        if batch.mode != "heldout":
            # A process may have had no group to draw.
            own = batch_metrics(batch, self._known) if len(batch) else {}
            parts = gather_object([(own, tuple(members_of(batch.episodes)))])
            members = [member for _, some in parts for member in some]  # a group may be shared by two processes
            spread = groups_without_spread(self._shaping.rewards(members, batch.group_size), batch.group_size)
            self._log({**merged([metrics for metrics, _ in parts]), "reward/groups_without_spread": spread})


def merged(parts: Sequence[Metrics]) -> dict[str, float]:
    """Return one value per name that any process has."""
    return {name: _one([part[name] for part in parts if name in part]) for name in dict.fromkeys(chain(*parts))}


def _one(metrics: Sequence[Metric]) -> float:
    reduce = metrics[0].over_processes
    if reduce is not None:
        return reduce(metric.value for metric in metrics)
    if len(metrics) == 1:
        return metrics[0].value  # to the last bit
    return sum(metric.value * metric.n for metric in metrics) / max(1, sum(metric.n for metric in metrics))


def batch_metrics(batch: RolloutBatch, known: Known | None = None) -> Metrics:
    """Return all metrics of a graded batch but those of whole groups."""
    agents = agent_metrics(batch.trajectories)
    return {**rollout_metrics(batch, known), **reward_metrics(batch), **dropped_metrics(batch), **agents}


def rollout_metrics(batch: RolloutBatch, known: Known | None = None) -> Metrics:
    """Return the metrics of the trajectories. The names under `completions/` are TRL's own."""
    trajectories, times = batch.trajectories, batch.times
    n = len(trajectories)
    turns = [turn for t in trajectories for turn in t.turns]
    sampled = [t.n_sampled for t in trajectories]
    finished = [t.n_sampled for t in trajectories if t.ended_itself]
    stops = Counter(t.stop_reason for t in trajectories)
    unmarked = sum(attempt.status in WITHOUT_MARKERS for t in trajectories for attempt in t.attempts)
    offered = (
        [] if known is None else [tool for tool in known.tools if any(may_call(e.row, tool) for e in batch.episodes)]
    )
    idle_share = times.engine_idle_s / times.duration_s if times.duration_s > 0 else 0.0
    return {
        "completions/mean_length": mean(sum(sampled), n),
        "completions/min_length": Metric(float(min(sampled)), min),
        "completions/max_length": Metric(float(max(sampled)), max),
        "completions/clipped_ratio": mean(n - len(finished), n),
        "completions/mean_terminated_length": mean(sum(finished), len(finished)),
        "rollout/turns": mean(len(turns), n),
        "turns/void": mean(sum(map(is_void, turns)), len(turns)),
        "answers/copied_result": mean(sum(copies_result(t.messages) for t in trajectories), n),
        "rollout/sampled_tokens": Metric(float(sum(sampled)), sum),
        "rollout/context_tokens": Metric(float(sum(t.n_context for t in trajectories)), sum),
        **_surprise(trajectories),
        "rollout/seconds": Metric(times.duration_s, max),
        "rollout/engine_idle_share": Metric(idle_share),
        **{f"stop/{reason}": mean(stops[reason], n) for reason in StopReason},
        "infrastructure/failed_episodes": mean(sum(map(failed_by_infrastructure, trajectories)), n),
        **({} if known is None else limit_metrics(trajectories, known.limits)),
        **({} if known is None or known.cache is None else {"engine/cache_demand": Metric(known.cache.demand, max)}),
        **tool_metrics(trajectories, offered),
        "tools/unmarked": Metric(float(unmarked), sum),  # answered or run, as `unmarked_calls` says
    }


def _surprise(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the mean negative log-probability that the engine gave its own tokens; about the entropy."""
    drawn = [logprob for t in trajectories for logprob in t.logprobs or () if logprob is not None]
    return {"sampling/surprise": mean(-sum(drawn), len(drawn))} if drawn else {}


def tool_metrics(trajectories: Sequence[Trajectory], offered: Sequence[str] = ()) -> Metrics:
    """Return calls and failures, per tool and by cause, latency percentiles, and turns that look like calls.

    Tools that a row offers, and all causes, are there whether they occurred or not.
    """
    results = [result for trajectory in trajectories for result in trajectory.results]
    n_calls = len(results)
    failures = [result for result in results if not result.ok]
    metrics = {
        "tools/called": Metric(float(n_calls), sum),
        "tools/call_frequency": mean(n_calls, len(trajectories)),
        "tools/failure_frequency": mean(len(failures), n_calls),
        "tools/truncated": Metric(float(sum(result.truncated for result in results)), sum),
        "tools/cached": Metric(float(sum(result.cached for result in results)), sum),
    }
    called, failed = (Counter(result.tool for result in some) for some in (results, failures))
    for name in dict.fromkeys([*(offered if len(offered) <= EACH_TOOL else (NO_TOOL,)), *called]):
        metrics[f"tools/{name}/calls"] = Metric(float(called[name]), sum)
        metrics[f"tools/{name}/failures"] = Metric(float(failed[name]), sum)
    causes = Counter(result.error for result in failures)
    for cause in ToolErrorKind:
        if offered or causes[cause]:
            metrics[f"tools/error/{cause}"] = Metric(float(causes[cause]), sum)
    latencies = sorted(result.duration_s for result in results)
    if latencies:
        metrics["tools/latency_p50"] = Metric(_quantile(latencies, 0.5), n=n_calls)
        metrics["tools/latency_p95"] = Metric(_quantile(latencies, 0.95), n=n_calls)
    if offered:
        like_calls = count_lookalikes(trajectories, offered)
        metrics |= {f"answers/like_calls/{form}": Metric(float(like_calls[form]), sum) for form in FORMS}
    return metrics


def reward_metrics(batch: RolloutBatch) -> Metrics:
    """Return success and the bounds of the reward."""
    totals = [total for total in batch.totals if total is not None]
    if not totals:
        return {}
    return {
        "success": mean(sum(batch.successes), len(totals)),
        "reward/min": Metric(min(totals), min),
        "reward/max": Metric(max(totals), max),
    }


def dropped_metrics(batch: RolloutBatch) -> Metrics:
    """Return how many episodes could not be scored, in all and by their causes."""
    causes = Counter(episode.drop.cause for episode in batch.episodes if episode.drop is not None)
    return {
        "dropped/episodes": Metric(float(causes.total()), sum),
        **{f"dropped/{cause}": Metric(float(count), sum) for cause, count in causes.items()},
    }


def groups_without_spread(rewards: Sequence[float | None], group_size: int) -> float:
    """Return the share of groups whose combined rewards are all alike. The rewards of a group stand together."""
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    return sum(is_dead(group) for group in groups) / len(groups)


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
