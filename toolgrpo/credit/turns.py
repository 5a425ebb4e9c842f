"""`credit: turns`: each turn gets what was earned from it on, less what others earned from there.

    advantage[i, t] = (G[i, t] - mean of G[j, t] over the others j alive at turn t) / std

alive: j has a turn t. With fewer than two alive, there is nobody to compare with at that turn, and
the mean outcome of the group's other episodes stands in. `std` is one number for the whole group.

The baseline of an episode is made of others alone, so it takes nothing from the gradient's mean,
and whoever goes on for another turn pays for it in the same coin as one who stops. Rewards that are
normalised turn by turn do not have this: there the cost of a turn is gone with its mean, and
taking one more is free (`tests/credit/test_bandit.py` shows both).

Pure functions; an episode without a score has 0, and takes no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from toolgrpo.credit.episodes import EpisodeTurns, in_groups
from toolgrpo.credit.returns import Returns, divisors, group_returns
from toolgrpo.signal.dead_groups import is_dead

__all__ = ["turn_advantages"]


def turn_advantages(
    episodes: Sequence[EpisodeTurns], group_size: int, gamma: float = 1.0, scale: str = "group"
) -> list[tuple[float, ...]]:
    """Return the advantage of each turn of each episode, the groups one after the other."""
    by = divisors(episodes, group_size, gamma, scale)
    found: list[tuple[float, ...]] = []
    for group, divisor in zip(in_groups(episodes, group_size), by, strict=True):
        for one, differences in zip(group, _differences(group, gamma), strict=True):
            found.append(tuple(value / divisor for value in differences) or (0.0,) * one.n_turns)
    return found


def _differences(group: Sequence[EpisodeTurns], gamma: float) -> list[list[float]]:
    returns = group_returns(group, gamma)
    outcomes = [None if of is None else one.total for one, of in zip(group, returns, strict=True)]
    found: list[list[float]] = [[] for _ in group]
    for turn in range(max((len(of) for of in returns if of is not None), default=0)):
        alive = _alive(returns, turn)
        if len(alive) == 1:
            ((place, value),) = alive.items()
            others = [total for other, total in enumerate(outcomes) if total is not None and other != place]
            found[place].append(value - fmean(others) if others else 0.0)
            continue
        total, alike = sum(alive.values()), is_dead(alive.values())
        for place, value in alive.items():
            found[place].append(0.0 if alike else value - (total - value) / (len(alive) - 1))
    return found


def _alive(returns: Returns, turn: int) -> dict[int, float]:
    return {place: of[turn] for place, of in enumerate(returns) if of is not None and len(of) > turn}
