"""Rows that the next steps take, in place of TRL's sampler: by which rule, and in which order. Rows alone, no episodes.

`Batches` (`batches.py`) plans with it before each step and says afterwards what is gone; a checkpoint keeps its state.

Invariants: every process has the same order of rows, and begins whole sets of its own; a row that was planned but not
used is the first of the next step; a checkpoint knows the rows that are gone, and what was in the queue is drawn anew, with
the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout.batch import Row
from toolgrpo.rollout.group_queue import Admission, GroupSet


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRule:
    """Rule for beginning and taking groups. `most_groups`: so many times the groups of a step at most."""

    sampling: SamplingOptions
    group_size: int
    replaces: bool = False  # dead groups; so groups are taken one by one, and not whole batches
    most_groups: float = 1.0
    staleness: int = 0

    def rule(self, target: int, left: int) -> Admission:
        """Return how a step takes `target` sets, if `left - 1` others follow it: nothing is begun that no step will take."""
        most = self.most_groups if self.replaces else 1.0
        return Admission.of(target, max_groups_drawn=most, beyond=min(self.staleness, left - 1) * target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Facts about the training that is drawn for."""

    step: Callable[[], int]
    left: Callable[[], int]  # batches to come, this one included
    weights: Callable[[], Iterable[tuple[str, Any]]]
    load_weights: Callable[[], int]  # into an engine that draws nothing now
    save: Callable[[], None]  # a checkpoint
    log: Callable[[Mapping[str, float]], None]


class RowOrder:
    """The rows still to be drawn. `order_of(epoch)` is the permutation of a pass over the data."""

    def __init__(self, n_rows: int, order_of: Callable[[int], Sequence[int]]) -> None:
        self._n_rows = n_rows
        self._order_of = order_of
        self.begin_anew()
        self._pass: tuple[int, Sequence[int]] | None = None
        self._planned: list[tuple[int, int | None]] = []

    def begin_anew(self) -> None:
        self._place = 0  # in the endless sequence of passes
        self._held: list[int] = []  # planned before, not used

    def plan(self, n: int) -> list[int]:
        """Return the next n rows, none of them used yet."""
        self._planned = [(row, None) for row in self._held[:n]]
        place = self._place
        while len(self._planned) < n:
            row, place = self._row_at(place), place + 1
            self._planned.append((row, place))
        return [row for row, _ in self._planned]

    def used(self, numbers: Iterable[int]) -> None:
        """Say which of the planned rows were drawn; the others stay for later."""
        drawn = set(numbers)
        last = max(drawn, default=-1)
        held_before = sum(place is None for _, place in self._planned)
        places = [place for _, place in self._planned[: last + 1] if place is not None]
        self._place = places[-1] if places else self._place
        # Rows before the last one drawn are held; those behind it were not passed yet, and the next plan finds them again.
        passed_over = [row for number, (row, _) in enumerate(self._planned[: last + 1]) if number not in drawn]
        self._held = [*passed_over, *self._held[min(held_before, last + 1) :]]
        self._planned = []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        epoch, position = divmod(self._place, self._n_rows)
        return {"epoch": epoch, "position": position, "held": list(self._held)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, also in a version that kept more."""
        self._place = state["epoch"] * self._n_rows + state["position"]
        self._held = list(state["held"])

    def _row_at(self, place: int) -> int:
        epoch, position = divmod(place, self._n_rows)
        if self._pass is None or self._pass[0] != epoch:
            self._pass = (epoch, self._order_of(epoch))
        return int(self._pass[1][position])


RowOf = Callable[[int], Row]
"""The row of the training data with this number."""


def group_sets(planned: Sequence[tuple[int, int]], row_of: RowOf, size: int, index: int, n: int) -> Iterator[GroupSet]:
    """Give the groups that process `index` of `n` begins of planned rows, each with its place and its number.

    They are dealt out in turn and not in blocks, so that those that no process reaches are the last of the plan.
    """
    for place, number in planned[index::n]:
        yield GroupSet((place,), (row_of(number),) * size)


def slice_sets(
    planned: Sequence[tuple[int, int]], row_of: RowOf, size: int, n_groups: int, share: slice
) -> Iterator[GroupSet]:
    """Give a process's share of one batch after the other, as TRL deals out its sampler's; a group may lie in two shares."""
    for start in range(0, len(planned), n_groups):
        batch = planned[start : start + n_groups]
        rows = [row_of(number) for _, number in batch for _ in range(size)]
        yield GroupSet(tuple(place for place, _ in batch), tuple(rows[share]))
