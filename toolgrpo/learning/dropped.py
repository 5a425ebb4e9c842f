"""Episodes of a graded batch that are not scored, and how many of them a run takes.

An episode that no reward could score is no failure of the model: it is left out of its group. Many
of them are failures of the infrastructure or of a plugin, and end the run with their causes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from toolgrpo.drops import Drop, DropCause, DropEpisode
from toolgrpo.errors import TooManyDroppedError
from toolgrpo.rollout.batch import Grade
from toolgrpo.trajectory import Trajectory

_REASONS_SHOWN = 3
_LONGEST_REASON = 200


def grade_of(
    trajectory: Trajectory, rewards: Mapping[str, float | None], total: float, dropped_by_reward: DropEpisode | None
) -> Grade:
    """Return what an episode is worth, or why that cannot be said."""
    drop = trajectory.dropped
    if drop is None and dropped_by_reward is not None:
        drop = dropped_by_reward.at(DropCause.REWARD)
    if drop is None and rewards and all(value is None for value in rewards.values()):
        drop = Drop(DropCause.NO_REWARD, "every reward function gave None")
    return Grade(rewards, total if drop is None else None, drop)


def check_dropped_share(drops: Sequence[Drop | None], most: float) -> None:
    """Raise if more than this share of the episodes of all processes was dropped."""
    dropped = [drop for drop in drops if drop is not None]
    if len(dropped) <= most * len(drops):
        return
    reasons = Counter(f"{drop.cause}: {_short(drop.reason)}" for drop in dropped).most_common()
    told = "; ".join(f"{count} x {reason}" for reason, count in reasons[:_REASONS_SHOWN])
    more = f"; and {len(reasons) - _REASONS_SHOWN} other reasons" if len(reasons) > _REASONS_SHOWN else ""
    raise TooManyDroppedError(
        f"{len(dropped)} of {len(drops)} episodes of this batch could not be scored, more than max_dropped_share "
        f"({most:g}) allows: {told}{more}. Nothing was trained on this batch. Mend the cause and go on with "
        f"--resume_from_checkpoint auto, or allow more with --max_dropped_share."
    )


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."
