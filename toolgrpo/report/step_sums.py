"""What the charts need of the episodes of one step: sums, shares and quantiles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from toolgrpo.signal.dead_groups import is_dead


class StepSums:
    """Adds up the episodes of one step and mode; `as_json` is what the page gets."""

    def __init__(self, mode: str, step: int, label: str | None) -> None:
        self.mode, self.step, self.label = mode, step, label
        self.n = self.successes = self.tokens = self.turns = 0
        self._rewards: list[float] = []
        self._groups: dict[Any, list[float | None]] = defaultdict(list)
        self._group_ok: dict[Any, list[bool]] = defaultdict(list)
        self._stops: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._tools: dict[str, _ToolSums] = defaultdict(_ToolSums)
        self._parts: dict[str, list[float]] = defaultdict(list)
        self.rollout_s: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one episode."""
        self.n += 1
        self.successes += bool(record.get("success"))
        reward = record.get("reward_given")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
        group = record.get("group")
        self._groups[group].append(reward)
        self._group_ok[group].append(bool(record.get("success")))
        self._stops[str(record.get("stop_reason"))] += 1
        self.tokens += sum(record.get("mask") or ())
        for name, value in (record.get("rewards") or {}).items():
            if isinstance(value, int | float):
                self._parts[str(name)[:100]].append(float(value))
        turns = record.get("turns") or ()
        self.turns += len(turns)
        for result in (result for turn in turns for result in turn.get("results") or ()):
            name, cause = str(result.get("name") or "unnamed")[:100], result.get("error")
            self._tools[name].add(cause, result.get("duration_s") or 0.0)
            if cause is not None:
                self._causes[str(cause)] += 1
        rollout_s = (record.get("timings") or {}).get("rollout_s")
        self.rollout_s = rollout_s if self.rollout_s is None else self.rollout_s

    def as_json(self) -> dict[str, Any]:
        n_rewards = len(self._rewards)
        mean = sum(self._rewards) / n_rewards if n_rewards else None
        variance = sum((reward - (mean or 0)) ** 2 for reward in self._rewards) / n_rewards if n_rewards else 0.0
        grouped = None not in self._groups and max(map(len, self._groups.values()), default=0) > 1
        dead = [group for group, rewards in self._groups.items() if is_dead(rewards)] if grouped else []
        solved = sum(all(self._group_ok[group]) for group in dead)
        return {
            "mode": self.mode,
            "step": self.step,
            "label": self.label,
            "n": self.n,
            "ok": self.successes,
            "r": None if mean is None else round(mean, 5),
            "sd": round(variance**0.5, 5),
            "groups": [len(self._groups) - len(dead), len(dead) - solved, solved] if grouped else None,
            "stops": dict(self._stops),
            "causes": dict(self._causes),
            "tools": {name: sums.as_json() for name, sums in self._tools.items()},
            "parts": {name: round(sum(values) / len(values), 5) for name, values in self._parts.items()},
            "tokens": round(self.tokens / self.n, 2),
            "turns": round(self.turns / self.n, 3),
            "rollout_s": self.rollout_s,
        }


class _ToolSums:
    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._failed: Counter[str] = Counter()

    def add(self, cause: str | None, seconds: float) -> None:
        self._seconds.append(seconds)
        if cause is not None:
            self._failed[str(cause)] += 1

    def as_json(self) -> dict[str, Any]:
        ordered = sorted(self._seconds)

        def quantile(q: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 4)

        return {"n": len(ordered), "failed": dict(self._failed), "p50": quantile(0.5), "p95": quantile(0.95)}
