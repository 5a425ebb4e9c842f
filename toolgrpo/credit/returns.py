"""Returns-to-go: what an episode earned from each of its turns on, and how far those of a group lie
apart.

    G[t] = r[t] + gamma * r[t+1] + ... + gamma^(last - t) * (r[last] + outcome)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import sqrt
from statistics import fmean

from toolgrpo.credit.episodes import EpisodeTurns, in_groups
from toolgrpo.signal.dead_groups import is_dead

__all__ = ["Returns", "divisors", "group_returns", "returns_to_go"]

_EPSILON = 1e-4  # what TRL adds to a standard deviation before it divides

Returns = list[tuple[float, ...] | None]
"""Of each episode of a group its returns-to-go; None: it is not scored."""


def returns_to_go(rewards: Sequence[float], outcome: float, gamma: float) -> tuple[float, ...]:
    """Return what was earned from each turn on; the outcome comes with the last turn."""
    found: list[float] = []
    later = outcome
    for place, reward in enumerate(reversed(rewards)):
        later = reward + (later if place == 0 else gamma * later)
        found.append(later)
    return tuple(reversed(found))


def group_returns(group: Sequence[EpisodeTurns], gamma: float) -> Returns:
    return [None if one.total is None else returns_to_go(one.rewards, one.total, gamma) for one in group]


def divisors(episodes: Sequence[EpisodeTurns], group_size: int, gamma: float, scale: str) -> list[float]:
    """Return by what the differences of each group are divided: one number for all its turns.

    `scale` is TRL's `scale_rewards`: the standard deviation of the group's returns-to-go, that of
    the whole batch's, or 1.
    """
    groups = [group_returns(group, gamma) for group in in_groups(episodes, group_size)]
    if scale == "none":
        return [1.0] * len(groups)
    if scale == "batch":
        return [_spread(list(chain.from_iterable(groups))) + _EPSILON] * len(groups)
    return [_spread(group) + _EPSILON for group in groups]


def _spread(returns: Returns) -> float:
    """Return the standard deviation of returns-to-go in which every episode counts once, however many
    turns it has; where turns are alike it is the sample standard deviation of the outcomes.
    """
    given = [of for of in returns if of]
    if len(given) < 2 or is_dead(chain.from_iterable(given)):
        return 0.0
    mean = fmean(fmean(of) for of in given)
    squares = sum(fmean((value - mean) ** 2 for value in of) for of in given)
    return sqrt(squares / (len(given) - 1))
