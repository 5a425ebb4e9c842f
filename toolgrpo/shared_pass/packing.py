"""Rows of tokens become one packed sequence in which a common beginning stands once.

The rows of a batch are a prefix tree: rows that begin alike share a segment, and go on in segments
of their own. A `Packing` is that tree laid out depth first in one sequence, with the position of
every token in its row, the label of every scored position, and where each scored value belongs.

Invariants (property tests hold them):

* following a leaf's ancestors to the root spells exactly the row, at positions 0, 1, 2, ...;
* a position that is scored for a row stands in that row's own leaf: what is shared is scored for
  nobody;
* a packing is never longer than its rows; nothing behind the last scored position of a row is
  computed at all.

Pure functions; the attention over a packing is in `attention.py`, the model is called in
`scoring.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["MIN_SHARED", "Packing", "Row", "Segment", "cut_into_passes", "pack", "rows_of_batch"]

MIN_SHARED = 16
"""Shorter common beginnings are not worth a segment of their own."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the model must read of one row of a batch:
    `tokens[i]` predicts `labels[i]`, -100 where nobody asks.

    `columns[i]` is where that prediction belongs in row `index` of the padded result.
    """

    index: int
    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def shareable(self) -> int:
        """How many leading tokens may be shared:
        those that are scored for nobody, and never the whole row.
        """
        first_scored = next((i for i, label in enumerate(self.labels) if label != -100), len(self.labels))
        return min(first_scored, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Segment:
    """`[start, end)` of the packed sequence: causal within itself, and everything in its ancestors
    is visible.
    """

    start: int
    end: int
    position: int  # of its first token in every row it belongs to
    ancestors: tuple[tuple[int, int], ...]  # packed [start, end) of the segments before it, from the root

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Packing:
    """One packed sequence of `n_tokens`, ready for one forward pass."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    labels: tuple[int, ...]  # already shifted: what the token at this place predicts
    segments: tuple[Segment, ...]
    scored: tuple[int, ...]  # packed places with a label
    rows: tuple[int, ...]  # of each scored place: the row of the batch
    columns: tuple[int, ...]  # of each scored place: the column of the result

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


def rows_of_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, scored_mask: torch.Tensor) -> list[Row]:
    """Return the rows with something to score; padding may stand anywhere and is dropped.

    `scored_mask` (B, T) says which tokens' log-probabilities are asked for. A token without a real
    token before it has none.
    """
    rows = []
    real = attention_mask.bool()
    batch = zip(input_ids.cpu(), real.cpu(), (scored_mask.bool() & real).cpu(), strict=True)
    for index, (ids, is_real, is_scored) in enumerate(batch):
        places = is_real.nonzero()[:, 0]
        tokens, scored = ids[places], is_scored[places]
        last = int(scored.nonzero()[-1]) if scored.any() else 0
        if last == 0:
            continue
        labels = torch.where(scored, tokens, -100)[1 : last + 1]
        rows.append(
            Row(
                index,
                tuple(tokens[:last].tolist()),
                tuple(labels.tolist()),
                tuple(places[1 : last + 1].tolist()),
            )
        )
    return rows


def pack(rows: Sequence[Row], *, min_shared: int = MIN_SHARED) -> Packing:
    """Lay the prefix tree of these rows out in one sequence."""
    if not rows:
        raise ValueError("nothing to pack: got no rows")
    ordered = sorted(rows, key=lambda row: row.tokens)
    builder = _Builder(ordered, _common_lengths(ordered), min_shared)
    builder.add(0, len(ordered), 0, ())
    return builder.packing()


def cut_into_passes(rows: Sequence[Row], max_tokens: int | None, *, min_shared: int = MIN_SHARED) -> list[list[Row]]:
    """Cut the prefix tree into runs of consecutive rows, as many in a pass as fit.

    A row that is too long alone gets its own pass.
    """
    ordered = sorted(rows, key=lambda row: row.tokens)
    if max_tokens is None or not ordered:
        return [ordered] if ordered else []
    passes: list[list[Row]] = []
    for row in ordered:
        if passes and pack([*passes[-1], row], min_shared=min_shared).n_tokens <= max_tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def _common_lengths(ordered: Sequence[Row]) -> list[int]:
    """Return how many leading tokens each row may share with the one before it."""
    lengths = [0]
    for before, row in itertools.pairwise(ordered):
        limit = min(before.shareable, row.shareable)
        if before.tokens[:limit] != row.tokens[:limit]:
            limit = next(i for i in range(limit) if before.tokens[i] != row.tokens[i])
        lengths.append(limit)
    return lengths


class _Builder:
    """Walks the prefix tree of sorted rows depth first."""

    def __init__(self, ordered: Sequence[Row], common: Sequence[int], min_shared: int) -> None:
        self.ordered, self.common, self.min_shared = ordered, common, max(1, min_shared)
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.labels: list[int] = []
        self.segments: list[Segment] = []
        self.scored: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []

    def add(self, low: int, high: int, depth: int, ancestors: tuple[tuple[int, int], ...]) -> None:
        """Lay out rows[low:high], whose first `depth` tokens are laid out in `ancestors`."""
        if high - low == 1:
            self._leaf(self.ordered[low], depth, ancestors)
            return
        shared = min(self.common[low + 1 : high])
        if shared - depth >= self.min_shared:
            span = self._segment(self.ordered[low], depth, shared, ancestors)
            self.labels.extend([-100] * (shared - depth))
            depth, ancestors = shared, (*ancestors, span)
        cuts = [i for i in range(low + 1, high) if self.common[i] - depth < self.min_shared]
        for start, end in zip([low, *cuts], [*cuts, high], strict=True):
            self.add(start, end, depth, ancestors)

    def _leaf(self, row: Row, depth: int, ancestors: tuple[tuple[int, int], ...]) -> None:
        start, _ = self._segment(row, depth, len(row.tokens), ancestors)
        labels = row.labels[depth:]
        self.labels.extend(labels)
        own = [i for i, label in enumerate(labels) if label != -100]
        self.scored.extend(start + i for i in own)
        self.rows.extend([row.index] * len(own))
        self.columns.extend(row.columns[depth + i] for i in own)

    def _segment(self, row: Row, depth: int, end: int, ancestors: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        start = len(self.tokens)
        self.tokens.extend(row.tokens[depth:end])
        self.positions.extend(range(depth, end))
        self.segments.append(Segment(start, len(self.tokens), depth, ancestors))
        return start, len(self.tokens)

    def packing(self) -> Packing:
        return Packing(
            tuple(self.tokens),
            tuple(self.positions),
            tuple(self.labels),
            tuple(self.segments),
            tuple(self.scored),
            tuple(self.rows),
            tuple(self.columns),
        )
