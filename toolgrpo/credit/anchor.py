"""`credit: anchor`: episodes of a group that stood in the same state are compared from there on.

    step[i, t] = (G[i, t] - mean of G over the group's visits to the state of (i, t)) / std
    advantage[i, t] = advantage of the episode, as without credit by turn + weight * step[i, t]

GiGPO's anchor states (arXiv 2505.10978). A state that was visited once has nothing to compare: its
step is 0, and the turn has its episode's advantage. `std` is one number for the whole group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from toolgrpo.credit.episodes import EpisodeTurns, in_groups
from toolgrpo.credit.returns import divisors, group_returns
from toolgrpo.signal.dead_groups import is_dead

__all__ = ["anchor_steps"]


def anchor_steps(
    episodes: Sequence[EpisodeTurns], group_size: int, gamma: float = 1.0, scale: str = "group"
) -> list[tuple[float, ...]]:
    """Return the step part of each turn of each episode, the groups one after the other."""
    by = divisors(episodes, group_size, gamma, scale)
    found: list[tuple[float, ...]] = []
    for group, divisor in zip(in_groups(episodes, group_size), by, strict=True):
        returns = group_returns(group, gamma)
        visits: defaultdict[str, list[float]] = defaultdict(list)
        for one, of in zip(group, returns, strict=True):
            for state, value in zip(one.states, of or (), strict=False):
                visits[state].append(value)
        means = {state: None if is_dead(values) else fmean(values) for state, values in visits.items()}
        for one, of in zip(group, returns, strict=True):
            found.append(
                (0.0,) * one.n_turns
                if of is None
                else tuple(_step(value, means[state], divisor) for state, value in zip(one.states, of, strict=True))
            )
    return found


def _step(value: float, mean: float | None, divisor: float) -> float:
    return 0.0 if mean is None else (value - mean) / divisor
