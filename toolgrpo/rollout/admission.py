"""Choose the groups that a step trains on, and when it draws more: a pure decision over what is known so far.

Groups wait in a queue, numbered in the order in which they were submitted. A step wants `target` live
ones. The first `target + carried` of the queue that are not dead are its window.

Invariants: of the window at most `carried` groups are passed over, and those are owed to the next
step, which waits for them: no group is overtaken for longer, so no short episode has a lasting
advantage; with `carried` 0 groups are admitted in the order of submission, never of completion, and
the decision depends on what they are worth and not on when they ended; no more than `most` groups are
drawn for a step; exactly `target` groups are admitted, at the bound with the earliest dead ones among
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Decision:
    """Begin so many more groups; or, once the step is decided, train on those of these numbers.

    With neither there is nothing to do but to wait. The first `owed` of what is neither dead nor
    admitted were passed over.
    """

    begin: int = 0
    admitted: tuple[int, ...] | None = None
    owed: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Number of live groups that a step wants, and of groups it may draw.

    `carried` may be left over from its window; `beyond` groups wait for later steps.
    """

    target: int
    most: int
    carried: int = 0
    beyond: int = 0

    @classmethod
    def of(cls, target: int, *, max_groups_drawn: float) -> Admission:
        """Return the rule for a number of groups, by a factor of it."""
        return cls(target, max(target, math.floor(target * max_groups_drawn)))

    def ahead(self, *, carried: int, beyond: int) -> Admission:
        """Return the rule of a step beside which groups of later ones run."""
        return replace(self, carried=carried, beyond=beyond)

    def decide(self, live: Sequence[bool | None], *, ended: Sequence[int] | None = None, owed: int = 0) -> Decision:
        """Say what follows from the groups so far, in the order of submission.

        Each is live, dead, or still open (None). `ended` are their numbers in the order in which
        they ended; the first `owed` were left over by the step before.
        """
        drawn = len(live)
        missing = self.target + self.beyond - live.count(None) - live.count(True)
        if missing > 0 and drawn < self.most + self.beyond:
            return Decision(begin=min(missing, self.most + self.beyond - drawn))
        head = live[: self.most + self.carried]
        window = [number for number, alive in enumerate(head) if alive is not False][: self.target + self.carried]
        admitted = sorted(self._first(window, live, range(drawn) if ended is None else ended, owed))
        if len(admitted) == self.target:
            return Decision(admitted=tuple(admitted), owed=len(window) - self.target)
        if None in head:
            return Decision()
        dead = [number for number, alive in enumerate(head) if not alive]
        alive = [number for number in window if live[number]]
        return Decision(admitted=tuple(sorted([*alive, *dead[: self.target - len(alive)]])))

    def _first(self, window: Sequence[int], live: Sequence[bool | None], ended: Sequence[int], owed: int) -> list[int]:
        """Return the live groups of the window to take, the owed ones before the others, or nothing
        while an owed one is open.
        """
        if any(live[number] is None for number in window if number < owed):
            return []
        first = [number for number in window if number < owed]
        return [*first, *(n for n in ended if n in window and n >= owed and live[n])][: self.target]
