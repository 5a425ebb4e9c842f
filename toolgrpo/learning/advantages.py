"""From the rewards of a group to the advantages of its episodes.

    grpo    (r - mean) / (std + 1e-4)          GRPO, arXiv 2402.03300, as TRL computes it
    loo     r - mean of the others             RLOO, arXiv 2402.14740
    max_rl  (r - mean) / mean, 0 if mean <= 0  MaxRL, arXiv 2602.02710; rewards of at least 0

Pure functions over the rewards of one batch, the groups one after the other, None for an episode
that is not scored: it takes no part, and its advantage is 0, as is that of a whole dead group.

`grpo` is here for rewards that were shaped after TRL had them; else TRL's own numbers are kept.

`Shaping` is a run's way there: which estimator, and how the rewards of several functions are combined before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from toolgrpo.errors import RewardError

if TYPE_CHECKING:
    from toolgrpo.episode.dropped import Drop
    from toolgrpo.rollout.batch import Scored

T = TypeVar("T")
Totals = Sequence[float | None]

_TRL_EPSILON = 1e-4


# The one definition of a dead group: its rewards are all alike, so it teaches nothing.

SAME_REWARD = 1e-6  # rewards are added up in fp32 in training


def is_dead(rewards: Iterable[float | None]) -> bool:
    """Return whether the valid combined rewards of one group differ by at most `SAME_REWARD`.

    None and NaN stand for an episode that is not scored. A group of none or one is dead.
    """
    valid = [reward for reward in rewards if reward is not None and not isnan(reward)]
    return not valid or max(valid) - min(valid) <= SAME_REWARD


# What the rewards of one group add up to, as TRL will combine them.


def weighted_sums(values: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of each episode's rewards.

    NaN stands for a function that does not score the episode; None for an episode without any score.
    """
    return [
        None
        if all(map(isnan, of_episode))
        else sum(weight * value for weight, value in zip(weights, of_episode, strict=True) if not isnan(value))
        for of_episode in values
    ]


def normalized_rewards(values: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float | None]:
    """Return the rewards of a group's episodes where TRL's `normalize_then_sum` is asked for: the weighted sums
    of each function's values less their mean, over their standard deviation.
    """
    columns = [_normalized(column) for column in zip(*values, strict=True)]
    return weighted_sums(list(zip(*columns, strict=True)), weights)


def _normalized(column: Sequence[float]) -> list[float]:
    scores = [value for value in column if not isnan(value)]
    if is_dead(column):  # rounding, divided by next to nothing, must not look like a spread
        return [value if isnan(value) else 0.0 for value in column]
    mean = sum(scores) / len(scores)
    std = sqrt(sum((value - mean) ** 2 for value in scores) / (len(scores) - 1))
    return [(value - mean) / (std + _TRL_EPSILON) for value in column]


def _from_mean(rewards: Sequence[float]) -> list[float]:
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def _from_the_others(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    return [n / (n - 1) * difference for difference in _from_mean(rewards)] if n > 1 else [0.0]


def _over_the_mean(rewards: Sequence[float]) -> list[float]:
    if min(rewards) < 0:
        raise RewardError(
            f"advantage max_rl needs rewards of at least 0, and an episode has {min(rewards):g}; use grpo or loo, or "
            f"rewards and weights that are not negative"
        )
    mean = fmean(rewards)
    return [difference / mean for difference in _from_mean(rewards)] if mean > 0 else [0.0] * len(rewards)


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimators: from the rewards of one group to advantages."""

    differences: Callable[[Sequence[float]], list[float]]
    divides_by_std: bool = False  # as TRL's `scale_rewards` says
    needs_nonnegative: bool = False  # rewards, so that nothing may be taken off them


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(_from_mean, divides_by_std=True),
    "loo": Estimator(_from_the_others),
    "max_rl": Estimator(_over_the_mean, needs_nonnegative=True),
}


def grouped_advantages(totals: Totals, group_size: int, estimator: str, scale: str = "group") -> list[float]:
    """Return the advantage of each episode.

    `scale` is TRL's `scale_rewards`: by what the differences are divided, where the estimator does that.
    """
    row = ESTIMATORS[estimator]
    scale = scale if row.divides_by_std else "none"
    advantages: list[float] = []
    for group in in_groups(totals, group_size):
        rewards = [reward for reward in group if reward is not None]
        differences = row.differences(rewards) if rewards else []
        own = iter([0.0] * len(rewards) if is_dead(rewards) else differences)
        by = _std(rewards) + _TRL_EPSILON if scale == "group" else 1.0
        advantages += [0.0 if reward is None else next(own) / by for reward in group]
    if scale == "batch":
        by = _std([reward for reward in totals if reward is not None]) + _TRL_EPSILON
        advantages = [advantage / by for advantage in advantages]
    return advantages


def _std(rewards: Sequence[float]) -> float:
    """Return the sample standard deviation, as torch does; 0 where there is none."""
    if len(rewards) < 2:
        return 0.0
    mean = fmean(rewards)
    return sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def in_groups(values: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return the values of one group after the other."""
    if len(values) % size:
        raise ValueError(f"{len(values)} episodes make no whole groups of {size}")
    return [values[start : start + size] for start in range(0, len(values), size)]


# What a group knows of its episodes, in all processes, and the run's rule for them.


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
