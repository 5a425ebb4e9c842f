"""Rollouts: rows become episodes, many at a time, and come back as one batch.

`episode.py` runs one episode within its `limits.py`; `scheduler.py` runs many at once; `rollouts.py` is what customers
call; `batch.py` is what they get; `observers.py` is how others hear of it. `group_queue.py` holds groups in flight for a
training that takes them one by one, or while it trains (`ahead.py`).
"""

from toolgrpo.rollout.batch import RolloutBatch, RolloutTimes, Scored
from toolgrpo.rollout.limits import EpisodeLimits
from toolgrpo.rollout.observers import EpisodeDone, Observer, RolloutBegan, RolloutEnded, TurnDone
from toolgrpo.rollout.rollouts import Rollouts
from toolgrpo.rollout.scheduler import Episode, EpisodeRunner, Player, Scheduler

__all__ = [
    "Episode",
    "EpisodeDone",
    "EpisodeLimits",
    "EpisodeRunner",
    "Observer",
    "Player",
    "RolloutBatch",
    "RolloutBegan",
    "RolloutEnded",
    "RolloutTimes",
    "Rollouts",
    "Scheduler",
    "Scored",
    "TurnDone",
]
