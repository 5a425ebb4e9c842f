"""Episodes of several segments, made of whole ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from toolgrpo.engines.base import SampleRequest
from toolgrpo.episode.segments import Segment, first_columns
from toolgrpo.episode.trajectory import Trajectory
from toolgrpo.testing import ByteChat


def read_before(trajectory: Trajectory, end: int) -> tuple[int, ...]:
    """Return what the model had read before the token at `end`: of its segment, the prompt included."""
    at = [one for one in trajectory.segment_starts if one.start + one.n_prompt <= end]
    return trajectory.ids[at[-1].start : end] if at else (*trajectory.prompt_ids, *trajectory.ids[:end])


def of_several_turns(request: SampleRequest, number: int) -> list[int]:
    """Script episodes of one to three turns, which call `look`, and answers of several lengths.

    Only a first turn knows its number, so that two runs of the same questions say the same.
    """
    turns, asked = request.ids.count(ByteChat.end), sum(request.ids)
    varied = asked + 5 * number if turns < 2 else asked
    if turns < 4 and varied % 3:
        return ByteChat.say(f'call look {{"at": {varied % 7}}}')
    return ByteChat.say("abcdefghijklm"[: 1 + varied % 13])


def cut_into_segments(whole: Trajectory, *places: int) -> Trajectory:
    """Return an episode of one segment as one of several, each of which goes on where another was cut.

    A segment's prompt is all that stands before its place, so every sampled token has read what it
    had read, and whatever learns from the two must learn the same.
    """
    ends = [0, *places, len(whole.ids)]
    segments = [
        Segment(
            (*whole.prompt_ids, *whole.ids[:start]),
            whole.ids[start:end],
            whole.mask[start:end],
            whole.logprobs[start:end],
            number - 1 if number else None,
        )
        for number, (start, end) in enumerate(pairwise(ends))
    ]
    moved: dict[int, int] = {}  # where a token of the whole episode stands in the row of the cut one
    for first, (start, end) in zip(first_columns(segments), pairwise(ends), strict=True):
        moved |= {place: first + place - start for place in range(start, end)}
    return Trajectory.of_segments(
        segments,
        messages=whole.messages,
        turns=[replace(turn, start=moved[turn.start], end=moved[turn.end - 1] + 1) for turn in whole.turns],
        **{
            name: getattr(whole, name)
            for name in ("stop_reason", "started_s", "duration_s", "failure", "reward", "metadata", "dropped")
        },
    )
