"""Several training sequences in one episode.

A segment is a prompt and what was added to it, append-only: the ids that the engine was asked to go
on from are always its prompt and its first so many ids. An episode has one of them, unless its
history was written anew (compaction), or something else began a sequence of its own (a sub-agent, an
agent that talks through the gateway).

In the row of its episode the segments lie one after the other, in order of birth, and the prompt of
every later one stands before it as tokens that nobody sampled (mask 0):

    prompt_ids    ids
    [prompt 0]    [ids 0][prompt 1][ids 1][prompt 2][ids 2]
                         ^ start          ^ start

So whatever counts, weighs or colours tokens of an episode by their place goes on as it did; who
reads tokens with a model takes `Trajectory.segments`.

Pure functions and values; this module imports nothing heavier than the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Segment:
    """One append-only training sequence of an episode; `mask` is 1 on ids that the model sampled."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    parent: int | None = None  # place of the segment that it goes on from; None: of none
    weights: tuple[int, int] | None = None  # the steps whose weights drew its first and its last token, if known

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a segment needs a prompt of at least one token")
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(
                f"a segment's ids, mask and logprobs must have one length; got {len(self.ids)}, {len(self.mask)}, {len(self.logprobs)}"
            )


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """Start of a later segment in the row of its episode."""

    start: int  # index into Trajectory.ids of the first token of its prompt
    n_prompt: int  # tokens of its prompt
    parent: int | None = None  # place of the segment that it goes on from, the first being 0


class Row(NamedTuple):
    """Segments of an episode, one after the other."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    segment_starts: tuple[SegmentStart, ...] = ()


def lay_out(segments: Sequence[Segment]) -> Row:
    """Return the row of an episode of these segments, given in order of birth."""
    if not segments:
        raise ValueError("an episode has at least one segment")
    first = segments[0]
    if first.parent is not None:
        raise ValueError(f"the first segment of an episode goes on from none, got parent {first.parent}")
    ids, mask, logprobs = list(first.ids), list(first.mask), list(first.logprobs)
    starts = []
    for one in segments[1:]:
        n_prompt = len(one.prompt_ids)
        starts.append(SegmentStart(len(ids), n_prompt, one.parent))
        ids += [*one.prompt_ids, *one.ids]
        mask += [*(0 for _ in range(n_prompt)), *one.mask]
        logprobs += [*(None for _ in range(n_prompt)), *one.logprobs]
    return Row(first.prompt_ids, tuple(ids), tuple(mask), tuple(logprobs), tuple(starts))


def cut_at_starts(row: Row) -> tuple[Segment, ...]:
    """Return the segments of a row; `lay_out` gives the row back."""
    first = SegmentStart(0, 0)
    ends = [*(one.start for one in row.segment_starts), len(row.ids)]
    found = []
    for at, end in zip((first, *row.segment_starts), ends, strict=True):
        own = slice(at.start + at.n_prompt, end)
        prompt = row.ids[at.start : own.start] if at is not first else row.prompt_ids
        found.append(Segment(prompt, row.ids[own], row.mask[own], row.logprobs[own], at.parent))
    return tuple(found)


def first_columns(segments: Sequence[Segment]) -> list[int]:
    """Return where the ids of each segment begin in the row of its episode."""
    return [0, *(at.start + at.n_prompt for at in lay_out(segments).segment_starts)]


def check_starts(starts: Sequence[SegmentStart], mask: Sequence[int]) -> None:
    """Raise ValueError if segments cannot begin there in a row with this mask."""
    for before, after in pairwise((*starts, SegmentStart(len(mask), 0))):
        end = before.start + before.n_prompt
        if before.start < 0 or before.n_prompt < 1 or end > after.start:
            raise ValueError(
                f"segments must follow one another, each with a prompt; got {list(starts)} in {len(mask)} tokens"
            )
        if any(mask[before.start : end]):
            raise ValueError(f"the prompt of the segment at {before.start} holds tokens that were sampled")
    for place, one in enumerate(starts, 1):
        if one.parent is not None and not 0 <= one.parent < place:
            raise ValueError(f"segment {place} must go on from one before it, got {one.parent}")
