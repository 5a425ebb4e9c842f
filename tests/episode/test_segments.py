from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.episode.segments import Segment, SegmentStart, cut_at_starts, first_columns, lay_out
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn

tokens = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5)
prompts = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def a_segment(prompt: list[int], own: list[tuple[int, bool]], parent: int | None = None) -> Segment:
    return Segment(
        tuple(prompt),
        tuple(token for token, _ in own),
        tuple(int(sampled) for _, sampled in own),
        tuple(-float(token) if sampled else None for token, sampled in own),
        parent,
    )


def of_three() -> Trajectory:
    ledger = Ledger([1, 2])
    ledger.sampled([3], [-0.3])
    ledger.turn(Turn(0, 1, "a", None, weights=(4, 4)))
    ledger.rewrite([1, 7])
    ledger.sampled([8, 9], [-0.8, -0.9])
    ledger.turn(Turn(3, 5, "b", None, weights=(4, 5)))
    ledger.context([10])
    ledger.sampled([11], [-1.1])
    ledger.turn(Turn(6, 7, "c", None, weights=(6, 6)))
    ledger.rewrite([1])
    ledger.sampled([12], [-1.2])
    ledger.turn(Turn(8, 9, "d", None))
    return ledger.finish(StopReason.FINISHED)


def test_a_rewrite_begins_a_segment_that_goes_on_from_the_one_before() -> None:
    done = of_three()
    assert done.prompt_ids == (1, 2) and done.ids == (3, 1, 7, 8, 9, 10, 11, 1, 12)
    assert done.mask == (1, 0, 0, 1, 1, 0, 1, 0, 1)
    assert done.segments == (
        Segment((1, 2), (3,), (1,), (-0.3,), None, (4, 4)),
        Segment((1, 7), (8, 9, 10, 11), (1, 1, 0, 1), (-0.8, -0.9, None, -1.1), 0, (4, 6)),
        Segment((1,), (12,), (1,), (-1.2,), 1, None),
    )
    assert (done.n_sampled, done.n_context) == (5, 1)  # what is read again was not added


def test_an_episode_of_one_segment_is_what_it_was() -> None:
    ledger = Ledger([1, 2])
    ledger.sampled([3], [-0.3])
    done = ledger.finish(StopReason.FINISHED)
    assert done.segments == (Segment((1, 2), (3,), (1,), (-0.3,)),)
    assert done.segment_starts == () and "segment_starts" not in done.to_record()
    assert ledger.n_added == len(ledger) == 1


def test_what_the_engine_continues_is_the_segment_that_is_written() -> None:
    ledger = Ledger([1, 2])
    ledger.sampled([3], [-0.3])
    ledger.rewrite([1, 7])
    assert ledger.all_ids == [1, 7] and (len(ledger), ledger.n_added) == (3, 1)
    ledger.context([5])
    assert ledger.all_ids == [1, 7, 5] and (len(ledger), ledger.n_added) == (4, 2)
    with pytest.raises(ValueError, match="at least one token"):
        ledger.rewrite([])


@given(
    first=st.tuples(prompts, tokens),
    later=st.lists(st.tuples(prompts, tokens, st.none() | st.integers(0, 99)), max_size=3),
)
def test_segments_lie_one_after_the_other_and_come_apart_again(
    first: tuple[list[int], list[tuple[int, bool]]],
    later: list[tuple[list[int], list[tuple[int, bool]], int | None]],
) -> None:
    segments = [a_segment(*first)]
    for prompt, own, parent in later:
        segments.append(a_segment(prompt, own, None if parent is None else parent % len(segments)))
    assert cut_at_starts(lay_out(segments)) == tuple(segments)
    done = Trajectory.of_segments(segments, messages=(), turns=(), stop_reason=StopReason.FINISHED)
    assert done.segments == tuple(segments)
    for at, one in zip(first_columns(segments), segments, strict=True):
        assert done.ids[at : at + len(one.ids)] == one.ids
    assert Trajectory.from_record(json.loads(json.dumps(done.to_record()))) == done


PLAIN = Trajectory((1,), (2, 3, 4, 5), (1, 1, 0, 0), (-1.0, -1.0, None, None), (), (), StopReason.FINISHED)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((SegmentStart(2, 0),), "each with a prompt"),
        ((SegmentStart(2, 3),), "follow one another"),
        ((SegmentStart(2, 2), SegmentStart(3, 1)), "follow one another"),
        ((SegmentStart(1, 1),), "were sampled"),
        ((SegmentStart(2, 1, 1),), "segment 1 must go on from one before it, got 1"),
    ],
)
def test_what_cannot_be_segments_is_no_trajectory(starts: tuple[SegmentStart, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, segment_starts=starts)


def test_what_is_no_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Segment((), (1,), (1,), (None,))
    with pytest.raises(ValueError, match="one length; got 1, 0, 1"):
        Segment((1,), (1,), (), (None,))
    with pytest.raises(ValueError, match="at least one segment"):
        lay_out([])
    with pytest.raises(ValueError, match="goes on from none"):
        lay_out([Segment((1,), (), (), (), parent=0)])
