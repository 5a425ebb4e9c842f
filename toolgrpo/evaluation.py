"""Success on held-out rows: the same episodes as in training, no gradients, with an interval that says how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.trajectory import Message, Trajectory

__all__ = ["Grader", "SuccessRate", "grade", "wilson_interval"]

Grader = Callable[..., list[float]]
"""A reward in TRL's form: `grader(prompts=, completions=, completion_ids=, **columns) -> list[float]`."""


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion; sound also near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class SuccessRate:
    successes: int
    n: int

    @property
    def rate(self) -> float:
        return self.successes / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.rate:.3f} [{low:.3f}, {high:.3f}]"


def grade(
    trajectories: Sequence[Trajectory],
    rows: Sequence[Mapping[str, Any]],
    graders: Sequence[Grader],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """The weighted reward of each trajectory, outside of training."""
    completions: list[list[Message]] = [list(t.messages) for t in trajectories]
    columns = {key: [row.get(key) for row in rows] for key in rows[0] if key != "prompt"} if rows else {}
    total = [0.0] * len(trajectories)
    for grader, weight in zip(graders, weights or [1.0] * len(graders), strict=True):
        rewards = grader(
            prompts=[row["prompt"] for row in rows],
            completions=completions,
            completion_ids=[list(t.ids) for t in trajectories],
            trajectories=list(trajectories),
            **columns,
        )
        total = [before + weight * reward for before, reward in zip(total, rewards, strict=True)]
    return total
