"""Numbers for the log about the advantages of turns, over the episodes of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from toolgrpo.credit.episodes import EpisodeTurns, in_groups
from toolgrpo.signal.dead_groups import is_dead

__all__ = ["turn_metrics"]

_MOST_TURNS = 16  # that have numbers of their own


def turn_metrics(
    episodes: Sequence[EpisodeTurns], advantages: Sequence[tuple[float, ...]], group_size: int
) -> dict[str, float]:
    """Return how far the turns of an episode lie apart, what turns of each index have, and how many
    groups teach by their turns alone.
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
