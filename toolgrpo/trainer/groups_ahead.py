"""Groups that run ahead of training and are taken one by one (`carry_over`, `dynamic_sampling`).

Where `overlap.py` takes whole batches in their order, here each process has a line of groups. At the
call for step t, in this order:

    hand over   the engine gets the weights of the last pass, between two of its steps
    draw        groups are begun until those of this step and of the next ones are in line, and
                taken as the rule of admission says; those that are left over go on
    agree       which rows are gone, and which are in line, in every process

With P groups of a process a step, `max_staleness` k and `carry_over` f, (1 + k + f) P groups are in
line. The rule looks at the first (1 + f) P of them that are not dead, waits for those that the step
before left over, and takes the first others to end.

Invariants: no group is trained on more than k + 1 steps after it began; every group is trained on or
dead; a checkpoint knows the rows that are gone, and what was in line is drawn anew, with the same
rows; nothing collective happens between hand over and agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from toolgrpo.rollout.batch import RolloutBatch, Row, Scored
from toolgrpo.rollout.group_line import AsItIs, GroupLine, LineDraw, as_it_is
from toolgrpo.rollout.observers import RolloutBegan
from toolgrpo.rollout.sources import Judge, Verdict
from toolgrpo.signal.admission import Admission
from toolgrpo.signal.row_order import RowOrder
from toolgrpo.trainer.overlap import RunAhead

V = TypeVar("V", bound=Verdict)


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How many groups run ahead of a step: `staleness` times its own, and `carry_over` of them."""

    staleness: int
    carry_over: float

    def carried(self, target: int) -> int:
        """Return how many groups of a step may be left over: at least one, and not all."""
        return max(1, int(self.carry_over * target)) if self.carry_over else 0

    def rule(self, admission: Admission, left: int) -> Admission:
        """Return the rule of a step that is followed by `left - 1` others."""
        carried = self.carried(admission.target)
        beyond = min(self.staleness * admission.target + carried, (left - 1) * admission.target)
        return admission.ahead(carried=min(carried, beyond), beyond=beyond)


class GroupsAhead:
    """The groups of one run, in one process."""

    def __init__(self, run: RunAhead, lookahead: Lookahead) -> None:
        self._run = run
        self._line: GroupLine[Any] = GroupLine(run.rollouts, group_size=run.group_size, trained=run.trained)
        self._lookahead = lookahead
        self._in_line: list[int] = []  # places of all processes' groups among the rows that are planned next
        self.planned: list[int] = []

    @property
    def order(self) -> RowOrder:
        return self._run.order

    @property
    def step(self) -> int:
        """The step of the training."""
        return self._run.step()

    def take(self, n_rows: int) -> RolloutBatch:
        """Return this process's `n_rows` episodes of the next batch, whatever they are worth; every
        process must ask for as many.
        """
        target = n_rows // self._run.group_size
        drawn: LineDraw[AsItIs] = self.draw(Admission.of(target, max_groups_drawn=1), as_it_is)
        self.agree(chain.from_iterable(self._run.exchange.gather([drawn.places])))
        return RolloutBatch(
            episodes=tuple(Scored(group.row, one) for group in drawn.draw.groups for one in group.trajectories),
            step=self.step,
            times=drawn.draw.times,
            group_size=self._run.group_size,
            offset=self._run.process * n_rows,
        )

    def draw(self, admission: Admission, judge: Judge[V]) -> LineDraw[V]:
        """Return the groups of this process's share of a step; `agree` must follow in every process."""
        run, step = self._run, self._run.hand_over(self._line)
        rule = self._lookahead.rule(admission, max(1, run.left()))
        self.planned = run.order.plan(len(self._in_line) + run.n_processes * (rule.most + rule.beyond))
        began = time.monotonic()
        drawn = run.exchange.all_or_none(
            lambda: self._line.draw(
                rule,
                run.sampling,
                RolloutBegan(admission.target * run.group_size, step, "train", "episodes"),
                rows=self._coming(),
                judge=judge,
            ),
            self.stop,
        )
        run.log(
            {
                "overlap/staleness": float(max(drawn.staleness)),
                "overlap/carried": float(drawn.carried),
                "overlap/waited": time.monotonic() - began,
                "overlap/batches_in_flight": len(self._line.places) / admission.target,
            }
        )
        return drawn

    def agree(self, used: Iterable[int]) -> None:
        """Say which of the planned rows are gone, in all processes."""
        gone = set(used)
        self._run.order.used(gone)
        self._line.renumber(gone)
        self._in_line = list(chain.from_iterable(self._run.exchange.gather([self._line.places])))

    def settle(self) -> None:
        """Wait until the engine is free for somebody else; what has ended is kept."""
        self._line.settle()

    def stop(self) -> None:
        """Cancel what is in line."""
        self._line.stop()
        self._in_line = []

    def _coming(self) -> Iterator[tuple[int, Row]]:
        """The rows that nobody has begun, of which the processes have one in turn."""
        taken = set(self._in_line)
        free = [place for place in range(len(self.planned)) if place not in taken]
        for place in free[self._run.process :: self._run.n_processes]:
            yield place, self._run.row_of(self.planned[place])
