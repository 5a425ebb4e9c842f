"""Turn-level credit assignment: the advantage of each turn of an episode.

    G[i, t] = r[i, t] + G[i, t + 1]          G[i, last] = r[i, last] + R[i]
    advantage[i, t] = (G[i, t] - mean of G[j, t] over the others j alive at turn t) / std

`r` are the rewards by turn, `R` is the reward of the whole episode. Episode j is alive at turn t if it
has a turn t; with fewer than two alive, the mean `R` of the group's other episodes is the baseline.
`std` is one number for the whole group.

The baseline of an episode is made of other episodes alone, so it leaves the mean of the gradient as it
is, and another turn costs the same as stopping. Rewards normalised turn by turn lose the cost of a turn
with its mean (`tests/learning/test_bandit.py` shows both).

Pure functions; a dropped episode has advantage 0 and is nobody's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import sqrt
from statistics import fmean, pstdev

from toolgrpo.learning.advantages import in_groups, is_dead
from toolgrpo.rollout.batch import Scored

_EPSILON = 1e-4  # TRL adds it to a standard deviation before it divides
_MOST_TURNS = 16  # that have metrics

LOSSES_BY_TOKEN = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
"""The losses of TRL that take an advantage for each token."""

Returns = list[tuple[float, ...] | None]
"""The returns-to-go of each episode of a group; None if it was dropped."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Options of credit by turn."""

    by_turn: bool = False
    scale: str = "group"  # of `turn_advantages`


@dataclass(frozen=True, slots=True)
class EpisodeTurns:
    """The rewards of one episode. Small, because processes send these to each other."""

    total: float | None  # of the whole episode; None if it was dropped
    rewards: tuple[float, ...]  # one per turn

    @property
    def n_turns(self) -> int:
        return len(self.rewards)


def episode_turns(episodes: Sequence[Scored]) -> list[EpisodeTurns]:
    """Return the rewards of graded episodes; an episode without rewards by turn has 0 for each."""
    return [EpisodeTurns(one.total, one.turn_rewards or (0.0,) * len(one.trajectory.turns)) for one in episodes]


def turn_advantages(episodes: Sequence[EpisodeTurns], group_size: int, scale: str = "group") -> list[tuple[float, ...]]:
    """Return the advantage of each turn of each episode, in whole groups.

    `scale` is TRL's `scale_rewards`: divide by the standard deviation of the group's returns-to-go,
    of the whole batch's, or by nothing.
    """
    groups = [_group_returns(group) for group in in_groups(episodes, group_size)]
    found: list[tuple[float, ...]] = []
    whole = _spread(list(chain.from_iterable(groups))) if scale == "batch" else 0.0
    for group, returns in zip(in_groups(episodes, group_size), groups, strict=True):
        divisor = 1.0 if scale == "none" else _EPSILON + (whole if scale == "batch" else _spread(returns))
        for one, differences in zip(group, _differences(group, returns), strict=True):
            found.append(tuple(value / divisor for value in differences) or (0.0,) * one.n_turns)
    return found


def teaches(group: Sequence[EpisodeTurns]) -> bool:
    """Return whether any turn of one group has an advantage, even if the episodes' rewards are alike."""
    return any(map(any, turn_advantages(group, len(group), "none")))


def turn_metrics(
    episodes: Sequence[EpisodeTurns], advantages: Sequence[tuple[float, ...]], group_size: int
) -> dict[str, float]:
    """Return the spread within an episode, the advantages by turn number, and the share of groups that
    teach by their turns alone.
    """
    several = [of for of in advantages if len(of) > 1]
    metrics = {"credit/spread_within_episode": fmean(pstdev(of) for of in several) if several else 0.0}
    for turn in range(min(_MOST_TURNS, max(map(len, advantages), default=0))):
        own = [of[turn] for of in advantages if len(of) > turn]
        metrics[f"credit/turn_{turn + 1}/mean"] = fmean(own)
        metrics[f"credit/turn_{turn + 1}/size"] = fmean(map(abs, own))
    scored = [one for one in episodes if one.total is not None]
    metrics["credit/turn_reward"] = fmean(sum(one.rewards) for one in scored) if scored else 0.0
    revived = [
        is_dead(one.total for one in group) and any(map(any, of))
        for group, of in zip(in_groups(episodes, group_size), in_groups(advantages, group_size), strict=True)
    ]
    metrics["credit/groups_revived"] = fmean(revived)
    return metrics


def _group_returns(group: Sequence[EpisodeTurns]) -> Returns:
    return [None if one.total is None else _returns_to_go(one.rewards, one.total) for one in group]


def _returns_to_go(rewards: Sequence[float], total: float) -> tuple[float, ...]:
    return tuple(accumulate(reversed(rewards), initial=total))[:0:-1]


def _spread(returns: Returns) -> float:
    """Return the standard deviation of returns-to-go, with each episode counted once.

    If the turns of an episode are alike, it is the sample standard deviation of the episodes' rewards.
    """
    given = [of for of in returns if of]
    if len(given) < 2 or is_dead(chain.from_iterable(given)):
        return 0.0
    mean = fmean(fmean(of) for of in given)
    squares = sum(fmean((value - mean) ** 2 for value in of) for of in given)
    return sqrt(squares / (len(given) - 1))


def _differences(group: Sequence[EpisodeTurns], returns: Returns) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in group]
    for turn in range(max((len(of) for of in returns if of is not None), default=0)):
        alive = {place: of[turn] for place, of in enumerate(returns) if of is not None and len(of) > turn}
        if len(alive) == 1:
            ((place, value),) = alive.items()
            others = [one.total for other, one in enumerate(group) if one.total is not None and other != place]
            found[place].append(value - fmean(others) if others else 0.0)
            continue
        total, alike = sum(alive.values()), is_dead(alive.values())
        for place, value in alive.items():
            found[place].append(0.0 if alike else value - (total - value) / (len(alive) - 1))
    return found
