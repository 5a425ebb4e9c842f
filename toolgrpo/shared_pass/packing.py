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

import numpy as np
import torch
from numpy.typing import NDArray

MIN_SHARED = 16
"""Shorter common beginnings are not worth a segment of their own."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """Tokens the model must read for one row of a batch:
    `tokens[i]` predicts `labels[i]`, -100 where nobody asks.

    `columns[i]` is where that prediction belongs in row `index` of the padded result.
    """

    index: int
    tokens: Numbers
    labels: Numbers
    columns: Numbers

    @property
    def shareable(self) -> int:
        """Return how many leading tokens may be shared:
        those that are scored for nobody, and never the whole row.
        """
        # a shared position has room for one label, and its rows may go on differently
        is_scored = self.labels != -100
        first_scored = int(is_scored.argmax()) if is_scored.any() else len(self.labels)
        return min(first_scored, len(self.tokens) - 1)

    @property
    def order(self) -> bytes:
        """Return the key by which rows are sorted: bytes in the order that their tokens have."""
        # big-endian: then bytes compare as the numbers do, and rows that begin alike are neighbours after sorting
        return self.tokens.astype(">u8").tobytes()


@dataclass(frozen=True, slots=True)
class PackedSegment:
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


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """One packed sequence of `n_tokens`, ready for one forward pass."""

    tokens: Numbers
    positions: Numbers
    labels: Numbers  # already shifted: what the token at this place predicts
    segments: tuple[PackedSegment, ...]
    scored: Numbers  # packed places with a label
    rows: Numbers  # of each scored place: the row of the batch
    columns: Numbers  # of each scored place: the column of the result

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


def rows_of_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, scored_mask: torch.Tensor) -> list[PackedRow]:
    """Return the rows with something to score; padding may stand anywhere and is dropped.

    `scored_mask` (B, T) says which tokens' log-probabilities are asked for. A token without a real
    token before it has none.
    """
    rows = []
    real = attention_mask.bool()
    scored = scored_mask.bool() & real
    labels = torch.where(scored, input_ids, -100)
    # one copy from the device: each would wait for all that the GPU still has to do
    parts = torch.stack([input_ids, labels, real.to(input_ids.dtype), scored.to(input_ids.dtype)]).cpu().numpy()
    batch = zip(parts[0], parts[1], parts[2] > 0, parts[3] > 0, strict=True)
    for index, (row_ids, row_labels, is_real, is_scored) in enumerate(batch):
        places = is_real.nonzero()[0]
        # the last scored token is only a label: nothing reads it
        last = int(is_scored[places].nonzero()[0].max(initial=0))
        if last == 0:
            continue
        after = places[1 : last + 1]
        rows.append(PackedRow(index, row_ids[places[:last]], row_labels[after], after))
    return rows


def pack(rows: Sequence[PackedRow], *, min_shared: int = MIN_SHARED) -> Packing:
    """Lay the prefix tree of these rows out in one sequence."""
    if not rows:
        raise ValueError("nothing to pack: got no rows")
    (packing,) = pack_in_passes(rows, None, min_shared=min_shared)
    return packing


def pack_in_passes(rows: Sequence[PackedRow], max_tokens: int | None, *, min_shared: int = MIN_SHARED) -> list[Packing]:
    """Cut the prefix tree into runs of consecutive rows, as many in a pass as fit,
    and lay each of them out.

    A row that is too long alone gets its own pass.
    """
    ordered = sorted(rows, key=lambda row: row.order)
    common, min_shared = _common_lengths(ordered), max(1, min_shared)
    packings = []
    for start, end in itertools.pairwise(_cuts(ordered, common, max_tokens, min_shared)):
        builder = _Builder(ordered, common, min_shared)
        builder.add(start, end, 0, ())
        packings.append(builder.packing())
    return packings


def _cuts(ordered: Sequence[PackedRow], common: Sequence[int], max_tokens: int | None, min_shared: int) -> list[int]:
    """Return the first row of each pass, and the number of rows.

    The length of a pass is known within a few tokens from sums alone; only where they leave it open
    is the tree walked.
    """
    cuts = [0]
    fewest = 0  # tokens of the pass that is being filled, if all that is common were shared
    for i, row in enumerate(ordered if max_tokens is not None else ()):
        assert max_tokens is not None
        fewest += len(row.tokens) - (common[i] if i > cuts[-1] else 0)
        # what `fewest` may be wrong by: each row may begin with so many common tokens that are not shared after all
        too_short_to_share = (i - cuts[-1]) * (min_shared - 1)
        if i == cuts[-1] or fewest + too_short_to_share <= max_tokens:
            continue
        if fewest > max_tokens or _length(ordered, common, cuts[-1], i + 1, min_shared) > max_tokens:
            cuts.append(i)
            fewest = len(row.tokens)
    return [*cuts, len(ordered)] if ordered else []


def _common_lengths(ordered: Sequence[PackedRow]) -> list[int]:
    """Return how many leading tokens each row may share with the one before it."""
    lengths = [0]
    shareable = [row.shareable for row in ordered]
    for (before, row), limit in zip(itertools.pairwise(ordered), map(min, itertools.pairwise(shareable)), strict=True):
        # at most the shareable part of both: what is scored for either must stay its own
        unlike = before.tokens[:limit] != row.tokens[:limit]
        lengths.append(int(unlike.argmax()) if unlike.any() else limit)
    return lengths


def _length(ordered: Sequence[PackedRow], common: Sequence[int], first: int, end: int, min_shared: int) -> int:
    """Return how many tokens the packing of rows[first:end] has, without laying it out."""
    length = sum(len(row.tokens) for row in ordered[first:end])
    parts = [(first, end, 0)]
    while parts:
        low, high, depth = parts.pop()
        if high - low > 1:
            depth, starts = _branches(common, low, high, depth, min_shared)
            length -= depth * (len(starts) - 1)
            parts += [(start, end, depth) for start, end in itertools.pairwise((*starts, high))]
    return length


def _branches(common: Sequence[int], low: int, high: int, depth: int, min_shared: int) -> tuple[int, list[int]]:
    """Return where rows[low:high], alike up to `depth`, stop sharing,
    and the first rows of the branches from there.
    """
    # of sorted rows the least common length of neighbours is common to all
    shared = min(common[low + 1 : high])
    if shared - depth >= min_shared:
        depth = shared
    return depth, [low, *(i for i in range(low + 1, high) if common[i] - depth < min_shared)]


class _Builder:
    """Walks the prefix tree of sorted rows depth first."""

    def __init__(self, ordered: Sequence[PackedRow], common: Sequence[int], min_shared: int) -> None:
        self.ordered, self.common, self.min_shared = ordered, common, min_shared
        self.n_tokens = 0
        self.tokens: list[Numbers] = []
        self.positions: list[Numbers] = []
        self.labels: list[Numbers] = []
        self.segments: list[PackedSegment] = []
        self.scored: list[Numbers] = []
        self.rows: list[Numbers] = []
        self.columns: list[Numbers] = []

    def add(self, low: int, high: int, depth: int, ancestors: tuple[tuple[int, int], ...]) -> None:
        """Lay out rows[low:high], whose first `depth` tokens are laid out in `ancestors`."""
        if high - low == 1:
            self._leaf(self.ordered[low], depth, ancestors)
            return
        shared, starts = _branches(self.common, low, high, depth, self.min_shared)
        if shared > depth:
            span = self._segment(self.ordered[low], depth, shared, ancestors)
            self.labels.append(np.full(shared - depth, -100))
            ancestors = (*ancestors, span)
        for start, end in itertools.pairwise((*starts, high)):
            self.add(start, end, shared, ancestors)

    def _leaf(self, row: PackedRow, depth: int, ancestors: tuple[tuple[int, int], ...]) -> None:
        start, _ = self._segment(row, depth, len(row.tokens), ancestors)
        labels = row.labels[depth:]
        own = (labels != -100).nonzero()[0]
        self.labels.append(labels)
        self.scored.append(start + own)
        self.rows.append(np.full(len(own), row.index))
        self.columns.append(row.columns[depth:][own])

    def _segment(self, row: PackedRow, depth: int, end: int, ancestors: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        start = self.n_tokens
        self.n_tokens += end - depth
        self.tokens.append(row.tokens[depth:end])
        # as in the row, not in the packing: rotary positions must be those of the padded pass
        self.positions.append(np.arange(depth, end))
        self.segments.append(PackedSegment(start, self.n_tokens, depth, ancestors))
        return start, self.n_tokens

    def packing(self) -> Packing:
        return Packing(
            np.concatenate(self.tokens),
            np.concatenate(self.positions),
            np.concatenate(self.labels),
            tuple(self.segments),
            np.concatenate(self.scored),
            np.concatenate(self.rows),
            np.concatenate(self.columns),
        )
