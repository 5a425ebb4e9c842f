"""Which road to a trained model fits what an untrained one did: the last line of `toolgrpo check`.

A plain rule over k episodes of each of n rows, asked in this order:

leave it                  nearly every episode succeeds
reinforce                 in a tenth of the groups or more some episodes succeed and some fail
fix the schema or prompt  half of the calls cannot be run or fail, most of them for one cause
train on own successes    in fewer groups than a tenth, but in some
show worked calls         where a group fails, all of it fails

Success decides, not the reward: groups that differ only in what they earn on the way are live, and may learn that alone.

Not covered: whether the road arrives. The thresholds are chosen, not measured.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from toolgrpo.evaluation.before_training import Untrained

_SOLVED = 0.95  # of the episodes
_MIXED = 0.1  # of the groups
_BROKEN = 0.5  # of the calls
_ONE_CAUSE = 0.7  # of those


class Road(StrEnum):
    LEAVE = "leave it"
    REINFORCE = "reinforce"
    MEND = "fix the schema or the prompt"
    OWN = "train on own successes"
    SHOW = "show worked calls"


def road_of(facts: Untrained) -> Road:
    """Return the road that fits these facts."""
    if facts.pass_1 >= _SOLVED:
        return Road.LEAVE
    if facts.mixed >= _MIXED * facts.n:
        return Road.REINFORCE
    if main_cause(facts) is not None:
        return Road.MEND
    return Road.OWN if facts.mixed else Road.SHOW


def main_cause(facts: Untrained) -> str | None:
    """Return what is wrong with most calls that went wrong, if as many went wrong as went well."""
    wrong = Counter(facts.malformed) + Counter(facts.failed)
    if not wrong or wrong.total() < _BROKEN * facts.calls:
        return None
    ((cause, count),) = wrong.most_common(1)
    return cause if count >= _ONE_CAUSE * wrong.total() else None
