"""Combined rewards of the episodes of whole groups, which advantages are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from toolgrpo.episode.dropped import Drop
from toolgrpo.learning.advantages import in_groups, normalized_rewards
from toolgrpo.rollout.batch import Scored


@dataclass(frozen=True, slots=True)
class Member:
    """One episode as its group knows it; small, because processes send these to each other."""

    total: float | None
    drop: Drop | None
    rewards: tuple[float, ...] = ()  # of each function; NaN: it does not score the episode


@dataclass(frozen=True, slots=True)
class Shaping:
    """The way from rewards to advantages: the estimator, by what it divides, and how rewards are combined."""

    advantage: str = "grpo"
    scale: str = "group"
    normalize_first: bool = False  # TRL's normalize_then_sum
    weights: tuple[float, ...] = ()  # of the reward functions; empty: 1 each

    def rewards(self, members: Sequence[Member], group_size: int) -> list[float | None]:
        """Return what advantages are made from, the combined reward of each episode: by its spread a
        group is dead or live. Groups stand one after the other.
        """
        if self.normalize_first:
            scored = [one.rewards if one.drop is None else (nan,) * len(one.rewards) for one in members]
            weights = self.weights or (1.0,) * (len(scored[0]) if scored else 0)
            return [reward for group in in_groups(scored, group_size) for reward in normalized_rewards(group, weights)]
        return [member.total for member in members]


def members_of(episodes: Sequence[Scored]) -> list[Member]:
    """Return what other processes need to know of graded episodes."""
    return [
        Member(one.total, one.drop, tuple(nan if value is None else value for value in one.rewards.values()))
        for one in episodes
    ]
