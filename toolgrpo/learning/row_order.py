"""The order in which rows are drawn, where steps draw more groups than they train on.

Invariants: every process has the same order, because all of them are told the same; what is drawn
is a function of the place in the order, so a resumed run draws what the run that never stopped would
have drawn; a row that was planned but not used is the first of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the endless sequence of passes."""

    epoch: int = 0
    position: int = 0


class RowOrder:
    """The rows still to be drawn. `order_of(epoch)` is the permutation of a pass over the data."""

    def __init__(self, n_rows: int, order_of: Callable[[int], Sequence[int]]) -> None:
        self._n_rows = n_rows
        self._order_of = order_of
        self._place = _Place()
        self._held: list[int] = []  # planned before, not used
        self._pass: tuple[int, Sequence[int]] | None = None
        self._planned: list[tuple[int, _Place | None]] = []

    def plan(self, n: int) -> list[int]:
        """Return the next n rows, none of them used yet."""
        self._planned = [(row, None) for row in self._held[:n]]
        place = self._place
        while len(self._planned) < n:
            row, place = self._row_at(place), self._after(place)
            self._planned.append((row, place))
        return [row for row, _ in self._planned]

    def used(self, numbers: Iterable[int]) -> None:
        """Say which of the planned rows were drawn; the others stay for later."""
        drawn = set(numbers)
        last = max(drawn, default=-1)
        held_before = sum(place is None for _, place in self._planned)
        places = [place for _, place in self._planned[: last + 1] if place is not None]
        self._place = places[-1] if places else self._place
        passed_over = [row for number, (row, _) in enumerate(self._planned[: last + 1]) if number not in drawn]
        self._held = [*passed_over, *self._held[min(held_before, last + 1) :]]
        self._planned = []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"epoch": self._place.epoch, "position": self._place.position, "held": list(self._held)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, also in a version that kept more."""
        self._place = _Place(state["epoch"], state["position"])
        self._held = list(state["held"])

    def _row_at(self, place: _Place) -> int:
        if self._pass is None or self._pass[0] != place.epoch:
            self._pass = (place.epoch, self._order_of(place.epoch))
        return int(self._pass[1][place.position])

    def _after(self, place: _Place) -> _Place:
        if place.position + 1 < self._n_rows:
            return _Place(place.epoch, place.position + 1)
        return _Place(place.epoch + 1, 0)
