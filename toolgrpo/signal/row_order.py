"""The order in which rows are drawn, where steps draw more groups than they train on, or draw rows
by how hard they are.

A pass over the data is a permutation. Rows that nobody drew yet are never passed over, but by their
weight: a row of weight w is drawn in a share w / (the largest weight) of the passes. The weight is
that of the row's pool, which the mean reward of its latest group decides.

Invariants: every process has the same order, because all of them are told the same; what is drawn
is a function of the seed, the place in the order and the rows' history, so a resumed run draws what
the run that never stopped would have drawn; a row that was planned but not used is the first of the
next step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["GroupResult", "Pool", "Pools", "RowHistory", "RowOrder"]


class Pool(StrEnum):
    """How hard a row was when it was drawn last."""

    HARD = "hard"
    NORMAL = "normal"
    EASY = "easy"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What is known of a row: the mean reward of its latest group (None: nothing was scored), and
    how many of its groups in succession were solved by all episodes.
    """

    mean: float | None = None
    solved_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group of this row was worth."""

    row: int
    mean: float | None
    solved: bool


@dataclass(frozen=True, slots=True)
class Pools:
    """The bounds of the pools and how often their rows are drawn; without weights all are alike."""

    hard_up_to: float = 0.25
    normal_up_to: float = 0.75
    weights: Mapping[Pool, float] = field(default_factory=lambda: dict.fromkeys(Pool, 1.0))
    retire_after_solved: int | None = None

    def pool(self, history: RowHistory | None) -> Pool:
        if history is None or history.mean is None:
            return Pool.UNSEEN
        if history.mean <= self.hard_up_to:
            return Pool.HARD
        return Pool.NORMAL if history.mean <= self.normal_up_to else Pool.EASY

    def retired(self, history: RowHistory | None) -> bool:
        k = self.retire_after_solved
        return k is not None and history is not None and history.solved_in_a_row >= k


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the endless sequence of passes."""

    epoch: int = 0
    position: int = 0


class RowOrder:
    """The rows still to be drawn. `order_of(epoch)` is the permutation of a pass.

    `left_out` are rows that are never drawn; `histories` is what is known of rows at the beginning.
    Rows stay in the pools they began in unless it `learns`.
    """

    def __init__(
        self,
        n_rows: int,
        order_of: Callable[[int], Sequence[int]],
        *,
        seed: int = 0,
        pools: Pools | None = None,
        left_out: Collection[int] = (),
        histories: Mapping[int, RowHistory] | None = None,
        learns: bool = True,
    ) -> None:
        if len(left_out) >= n_rows:
            raise ValueError("no row is left to draw")
        self._n_rows = n_rows
        self._order_of = order_of
        self._seed = seed
        self._pools = pools or Pools()
        self._left_out = frozenset(left_out)
        self._histories = {row: one for row, one in (histories or {}).items() if row not in self._left_out}
        self._learns = learns
        self._place = _Place()
        self._held: list[int] = []  # planned before, not used
        self._pass: tuple[int, Sequence[int]] | None = None
        self._planned: list[tuple[int, _Place | None]] = []

    def plan(self, n: int) -> list[int]:
        """Return the next n rows, none of them used yet."""
        weights = self._weights()
        held = [row for row in self._held if self._weight(row, weights) > 0][:n]
        self._held = [row for row in self._held if self._weight(row, weights) > 0]
        self._planned = [(row, None) for row in held]
        place, most = self._place, max(weights.values())
        while len(self._planned) < n:
            row = self._row_at(place)
            weight = self._weight(row, weights)
            taken = weight > 0 and (weight >= most or self._coin(place) < weight / most)
            place = self._after(place)
            if taken:
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

    def learn(self, results: Iterable[GroupResult]) -> None:
        """Remember what the groups of some rows were worth."""
        for result in results:
            before = self._histories.get(result.row, RowHistory())
            self._histories[result.row] = RowHistory(
                result.mean if self._learns and result.mean is not None else before.mean,
                before.solved_in_a_row + 1 if result.solved else 0,
            )

    def sizes(self) -> dict[str, int]:
        """Return how many rows each pool has, and how many are retired."""
        seen = Counter(self._pools.pool(one) for one in self._histories.values() if not self._pools.retired(one))
        retired = sum(map(self._pools.retired, self._histories.values()))
        seen[Pool.UNSEEN] += self._n_rows - len(self._left_out) - len(self._histories)
        return {**{pool.value: seen[pool] for pool in Pool}, "retired": retired}

    @property
    def epoch(self) -> int:
        """The pass that is under way, from 0."""
        return self._place.epoch

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "epoch": self._place.epoch,
            "position": self._place.position,
            "held": list(self._held),
            "rows": {row: [one.mean, one.solved_in_a_row] for row, one in self._histories.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._place = _Place(state["epoch"], state["position"])
        self._held = list(state["held"])
        self._histories = {row: RowHistory(mean, solved) for row, (mean, solved) in state["rows"].items()}

    def _weights(self) -> dict[Pool, float]:
        """Return the weights of the pools that have rows; 1 each where no row would be drawn."""
        sizes = self.sizes()
        weights = {pool: weight for pool, weight in self._pools.weights.items() if sizes[pool.value]}
        if any(weight > 0 for weight in weights.values()):
            return {pool: weights.get(pool, 0.0) for pool in Pool}
        self._forgive()
        return dict.fromkeys(Pool, 1.0)

    def _forgive(self) -> None:
        """Let retired rows come back: none is left."""
        self._histories = {row: RowHistory(one.mean) for row, one in self._histories.items()}

    def _weight(self, row: int, weights: Mapping[Pool, float]) -> float:
        if row in self._left_out:
            return 0.0
        history = self._histories.get(row)
        return 0.0 if self._pools.retired(history) else weights[self._pools.pool(history)]

    def _row_at(self, place: _Place) -> int:
        if self._pass is None or self._pass[0] != place.epoch:
            self._pass = (place.epoch, self._order_of(place.epoch))
        return int(self._pass[1][place.position])

    def _after(self, place: _Place) -> _Place:
        if place.position + 1 < self._n_rows:
            return _Place(place.epoch, place.position + 1)
        return _Place(place.epoch + 1, 0)

    def _coin(self, place: _Place) -> float:
        return random.Random(f"{self._seed}/{place.epoch}/{place.position}").random()
