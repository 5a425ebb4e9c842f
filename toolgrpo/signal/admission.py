"""Which groups a step trains on, and when it draws more: a pure decision over what is known so far.

Groups are numbered in the order in which they were submitted. A step wants `target` live ones.

Invariants: groups are admitted in the order of submission, never of completion: one that ended is
passed over only if it is dead, and waited for as long as it is open, so no short episode has an
advantage; the decision depends on what the groups are worth and not on when they ended; no more
than `most` groups are drawn; exactly `target` groups are admitted, at the bound with the earliest
dead ones among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Admission", "Decision"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Draw so many more groups; or, once the step is decided, train on those of these numbers.

    With neither there is nothing to do but to wait. `decided` counts the groups up to the last that
    mattered: those after them are surplus, whatever they are worth.
    """

    draw: int = 0
    admitted: tuple[int, ...] | None = None
    decided: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """How many live groups a step wants, with how many it begins, and how many it may draw."""

    target: int
    most: int
    begin_with: int

    @classmethod
    def of(cls, target: int, *, oversample: float, max_groups_drawn: float) -> Admission:
        """Return the rule for a number of groups, by factors of it."""
        most = max(target, math.floor(target * max_groups_drawn))
        return cls(target, most, min(most, math.ceil(target * oversample)))

    def decide(self, live: Sequence[bool | None]) -> Decision:
        """Say what follows from the groups so far, in the order of submission.

        Each is live, dead, or still open (None).
        """
        drawn = len(live)
        if not drawn:
            return Decision(draw=self.begin_with) if self.target else Decision(admitted=())
        admitted: list[int] = []
        for number, alive in enumerate(live):
            if alive is None:
                break
            if alive:
                admitted.append(number)
            if len(admitted) == self.target:
                return Decision(admitted=tuple(admitted), decided=number + 1)
        n_open = live.count(None)
        missing = self.target - n_open - live.count(True)
        if missing > 0 and drawn < self.most:
            return Decision(draw=min(missing, self.most - drawn))
        if n_open:
            return Decision()
        dead = [number for number, alive in enumerate(live) if not alive]
        return Decision(admitted=tuple(sorted([*admitted, *dead[: self.target - len(admitted)]])), decided=drawn)
