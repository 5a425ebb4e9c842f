from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn

PROMPT = [1, 2, 3]
ids = st.lists(st.integers(0, 200_000), max_size=6)
steps = st.lists(st.tuples(st.booleans(), ids), max_size=12)


def example() -> Trajectory:
    ledger = Ledger(PROMPT)
    ledger.sampled([4, 5], [-0.1, -0.2])
    ledger.context([6])
    ledger.sampled([7], [-0.3])
    call = CallAttempt(AttemptStatus.OK, '{"name": "f"}', "f", {"a": [1, {"b": None}], "ü": "\U0001f600"})
    broken = CallAttempt(AttemptStatus.INVALID_JSON, "{", detail="the call is not valid JSON")
    good = ToolResult("3", "f", started_s=0.5, duration_s=0.25, cached=True)
    bad = ToolResult("Error: no", None, ToolErrorKind.INVALID_JSON, left_out=7)
    ledger.turn(Turn(0, 2, "well", "hm", (call, broken), (good, bad), duration_s=1.5))
    ledger.turn(Turn(3, 4, "done", None, closed=False))
    ledger.say({"role": "assistant", "content": "well"}, {"role": "tool", "content": "3", "name": "f"})
    return ledger.finish(
        StopReason.LENGTH, started_s=10.0, duration_s=2.0, failure="why", reward=0.5, metadata={"row": 3}
    )


@given(steps=steps, logprobs=st.booleans())
def test_the_mask_is_one_exactly_on_what_was_sampled_and_a_record_gives_it_back(
    steps: list[tuple[bool, list[int]]], logprobs: bool
) -> None:
    ledger = Ledger(PROMPT, expects_logprobs=logprobs)
    expected: list[tuple[int, int, float | None]] = []
    for sampled, tokens in steps:
        if sampled:
            ledger.sampled(tokens, [-float(token) for token in tokens] if logprobs else None)
        else:
            ledger.context(tokens)
        expected += [(token, int(sampled), -float(token) if sampled and logprobs else None) for token in tokens]
        assert len(ledger) == len(expected) and ledger.all_ids == PROMPT + [token for token, _, _ in expected]
    done = ledger.finish(StopReason.DEADLINE)
    assert list(zip(done.ids, done.mask, done.logprobs, strict=True)) == expected
    assert done.prompt_ids == tuple(PROMPT) and done.has_logprobs == (logprobs or not sum(done.mask))
    assert (done.n_sampled, done.n_context) == (sum(m for _, m, _ in expected), sum(not m for _, m, _ in expected))
    assert Trajectory.from_record(json.loads(json.dumps(done.to_record()))) == done


def test_a_record_reads_with_what_older_and_longer_ones_hold_and_shares_nothing() -> None:
    done = example()
    done = dataclasses.replace(done, turns=(dataclasses.replace(done.turns[0], weights=(3, 4)), *done.turns[1:]))
    record = json.loads(json.dumps(done.to_record()))
    assert Trajectory.from_record(record) == done
    record["turns"][0]["taken_over"] = [[1, 4]]  # of when turns said where weights changed
    assert Trajectory.from_record({"step": 3, "row": {}, "outputs": [{"start": 0}], **record}) == done
    done = example()
    record = done.to_record()
    record["messages"][0]["content"] = record["turns"][0]["attempts"][0]["arguments"]["a"] = "changed"
    assert done == example()
    assert [attempt.status for attempt in done.attempts] == [AttemptStatus.OK, AttemptStatus.INVALID_JSON]
    assert [result.ok for result in done.results] == [True, False]


def test_log_probabilities_are_required_where_the_engine_gives_them_and_never_invented() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens came without"):
        Ledger(PROMPT).sampled([4, 5], None)
    with pytest.raises(ValueError, match="2 sampled tokens came with 1"):
        Ledger(PROMPT).sampled([4, 5], [-0.1])
    with pytest.raises(ValueError, match="missing among those of 2 sampled tokens"):
        Ledger(PROMPT).sampled([4, 5], [-0.1, None])  # type: ignore[list-item]  # the point of the case
    ledger = Ledger(PROMPT, expects_logprobs=False)
    ledger.sampled([4, 5], None)
    done = ledger.finish(StopReason.FINISHED)
    assert done.logprobs == (None, None) and not done.has_logprobs


def test_a_finished_ledger_takes_nothing() -> None:
    ledger = Ledger(PROMPT)
    done = ledger.finish(StopReason.FINISHED)
    for verb in (
        lambda: ledger.sampled([1], [-1.0]),
        lambda: ledger.context([1]),
        lambda: ledger.rewrite([1]),
        lambda: ledger.say({"role": "assistant", "content": ""}),
        lambda: ledger.turn(Turn(0, 0, "", None)),
        lambda: ledger.finish(StopReason.FINISHED),
    ):
        with pytest.raises(ValueError, match="finished"):
            verb()
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.ids = (1,)  # type: ignore[misc]


def test_what_is_malformed_does_not_become_a_ledger_or_a_trajectory() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Ledger([])
    with pytest.raises(ValueError, match="one length; got 2, 1, 2"):
        dataclasses.replace(example(), ids=(1, 2), mask=(1,), logprobs=(None, None))


def test_results_judge_the_attempts_they_answer_and_leave_the_rest() -> None:
    call = CallAttempt(AttemptStatus.OK, "", "f", {})
    broken = CallAttempt(AttemptStatus.UNCLOSED, "{", detail="the call was not closed")
    turn = Turn(0, 1, "", None, (call, call, call, broken, call, call))
    kind, status = ToolErrorKind, AttemptStatus
    errors = (None, kind.UNKNOWN_TOOL, kind.BAD_ARGUMENTS, kind.UNCLOSED, kind.RAISED)
    answered = turn.answered([ToolResult("text", "f", error) for error in errors])
    # The tool raised: the call itself was good. The last one was never answered.
    wanted = [status.OK, status.UNKNOWN_TOOL, status.BAD_ARGUMENTS, status.UNCLOSED, status.OK, status.OK]
    assert [attempt.status for attempt in answered.attempts] == wanted
    assert [attempt.detail for attempt in answered.attempts] == ["", "text", "text", "the call was not closed", "", ""]
    assert len(answered.results) == 5


def test_calls_are_attempts_with_what_came_back() -> None:
    ledger = Ledger(PROMPT)
    ledger.sampled([5], [-1.0])
    good = CallAttempt(AttemptStatus.OK, "", "add", {"a": 1})
    bad = CallAttempt(AttemptStatus.INVALID_JSON, "{", detail="no JSON")
    results = (ToolResult("3", "add", duration_s=0.5), ToolResult("?", None, ToolErrorKind.INVALID_JSON))
    ledger.turn(Turn(0, 1, "", None, (good, bad), results))
    ledger.turn(Turn(0, 1, "", None, (good,)))  # the episode ended before it was run
    calls = ledger.finish(StopReason.MAX_TURNS).calls
    assert [(c.turn, c.name, c.result, c.error, c.ok) for c in calls] == [
        (0, "add", "3", None, True),
        (0, None, "?", ToolErrorKind.INVALID_JSON, False),
        (1, "add", None, None, False),
    ]
    assert calls[0].duration_s == 0.5 and calls[1].status is AttemptStatus.INVALID_JSON
