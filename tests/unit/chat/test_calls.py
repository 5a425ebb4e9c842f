from __future__ import annotations

import json

import pytest

from toolgrpo.chat.calls import Marker, read_call, read_turn
from toolgrpo.trajectory import AttemptStatus

CALL, CALL_END, THINK, THINK_END = Marker.CALL, Marker.CALL_END, Marker.THINK, Marker.THINK_END
GOOD = '{"name": "f", "arguments": {}}'


def test_thinking_content_and_calls_are_kept_apart_in_order() -> None:
    turn = read_turn([THINK, "\nhm\n", THINK_END, "\n\nok\n", CALL, GOOD, CALL_END, CALL, "{", CALL_END], closed=True)
    assert (turn.reasoning, turn.content) == ("hm", "ok")
    assert [attempt.status for attempt in turn.attempts] == [AttemptStatus.OK, AttemptStatus.INVALID_JSON]


@pytest.mark.parametrize("before", [[], [THINK, "first", THINK_END]])
def test_a_call_inside_any_thinking_is_no_call(before: list[object]) -> None:
    turn = read_turn([*before, THINK, CALL, GOOD, CALL_END, THINK_END, "done"], closed=True)  # type: ignore[list-item]
    assert turn.attempts == () and turn.content == "done"


def test_thinking_that_the_prompt_opened() -> None:
    turn = read_turn(["hm", CALL, GOOD, CALL_END, THINK_END, "done"], closed=True)
    assert turn.reasoning == "hm" and turn.content == "done" and turn.attempts == ()


def test_a_call_that_is_cut_or_opened_twice_is_unclosed() -> None:
    turn = read_turn([CALL, "a", CALL, "b"], closed=False)
    assert [(a.status, a.raw) for a in turn.attempts] == [(AttemptStatus.UNCLOSED, "a"), (AttemptStatus.UNCLOSED, "b")]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (GOOD, AttemptStatus.OK),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', AttemptStatus.OK),
        ('{"name": "f"}', AttemptStatus.OK),
        ('{"arguments": {}}', AttemptStatus.MISSING_NAME),
        ('{"name": 3}', AttemptStatus.MISSING_NAME),
        ("[]", AttemptStatus.MISSING_NAME),
        ('{"name": "f", "arguments": [1]}', AttemptStatus.BAD_ARGUMENTS),
        ('{"name": "f", "arguments": "{"}', AttemptStatus.INVALID_JSON),
        ("", AttemptStatus.INVALID_JSON),
        ("[" * 100_000, AttemptStatus.INVALID_JSON),
        ('{"name": "f", "arguments": ' + '{"a":' * 600 + "1" + "}" * 601, AttemptStatus.INVALID_JSON),
    ],
)
def test_every_attempt_has_a_status_and_says_what_is_wrong(raw: str, status: AttemptStatus) -> None:
    attempt = read_call(raw)
    assert attempt.status is status and attempt.raw == raw
    assert bool(attempt.detail) == (status is not AttemptStatus.OK)
    json.dumps(attempt.arguments if attempt.arguments is None else dict(attempt.arguments))
