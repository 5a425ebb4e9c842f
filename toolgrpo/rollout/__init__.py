"""Rollouts: rows become episodes, many at a time, and come back as one batch.

`episode.py` runs one episode within its `limits.py`; `scheduler.py` runs many at once; callers use `rollouts.py` and
get a `batch.py`; `observers.py` notifies others. `group_queue.py` holds groups in flight for a training that takes them
one by one, or during the training pass (`ahead.py`).
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
