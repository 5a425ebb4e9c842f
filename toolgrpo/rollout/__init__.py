"""Rollouts: one episode (`episode.py`), its limits (`limits.py`), and many episodes at once (`scheduler.py`)."""

from toolgrpo.rollout.episode import Episode, EpisodeRunner
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.rollout.scheduler import RolloutResult, run_episodes, run_rollout

__all__ = [
    "Episode",
    "EpisodeLimits",
    "EpisodeRunner",
    "RolloutResult",
    "run_episodes",
    "run_rollout",
]
