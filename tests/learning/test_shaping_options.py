"""Void turns and copied results, as they are counted and flagged."""

from __future__ import annotations

import json

import pytest

from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import Trajectory, Turn, copies_result, is_void, is_void_record
from toolgrpo.observe.metrics import rollout_metrics
from toolgrpo.report.episode_data import COPIED, VOID, flags_of
from toolgrpo.rollout.batch import RolloutBatch, Scored
from toolgrpo.testing import ByteChat, ScriptedEngine, ScriptedTools
from toolgrpo.testing.engine import run_episode


def called(*statuses: AttemptStatus) -> Turn:
    return Turn(0, 1, "so", None, tuple(CallAttempt(status, "raw", "add") for status in statuses))


@pytest.mark.parametrize(
    ("turn", "void"),
    [
        (Turn(0, 1, "the answer is 3", None), False),
        (Turn(0, 1, " \n", "some thought"), True),  # reasoning alone
        (Turn(0, 1, "the answer i", None, closed=False), True),  # cut without a call
        (called(AttemptStatus.UNKNOWN_TOOL), False),
        (called(AttemptStatus.INVALID_JSON), True),  # none can be read
        (called(AttemptStatus.INVALID_JSON, AttemptStatus.BAD_ARGUMENTS), False),
        (called(AttemptStatus.ACCEPTED), False),
        (called(AttemptStatus.UNMARKED), True),  # answered, and not run
    ],
)
def test_a_void_turn_has_neither_a_call_nor_an_answer(turn: Turn, void: bool) -> None:
    assert is_void(turn) is void


def episode(*texts: str) -> Trajectory:
    tools = ScriptedTools({"add": lambda a, b: str(a + b)})
    return run_episode(ScriptedEngine([ByteChat.say(text) for text in texts]), tools)


def test_an_episode_with_a_void_turn_is_flagged() -> None:
    whole = episode("call add {", 'call add {"a": 1, "b": 2}', "3")
    assert [is_void(turn) for turn in whole.turns] == [True, False, False]
    record = json.loads(json.dumps(whole.to_record()))
    assert [is_void_record(turn) for turn in record["turns"]] == [True, False, False] and flags_of(record) & VOID
    metrics = rollout_metrics(RolloutBatch(episodes=(Scored({}, whole),)))
    assert metrics["turns/void"].value == pytest.approx(1 / 3)
    assert not flags_of(episode("3").to_record()) & VOID


@pytest.mark.parametrize(
    ("answer", "copied"),
    [
        ("<tool_response>\n3\n</tool_response>", True),
        ("```json\n<tool_response>3", True),  # in a fence, cut
        ("<tool_response>\n4\n</tool_response>", False),  # another number
        ("The result is 3", False),
    ],
)
def test_a_copy_of_the_last_result_is_told_from_an_answer(answer: str, copied: bool) -> None:
    whole = episode('call add {"a": 1, "b": 2}', answer)
    assert copies_result(whole.messages) is copied and bool(flags_of(whole.to_record()) & COPIED) is copied
    batch = RolloutBatch(episodes=(Scored({}, whole),))
    assert rollout_metrics(batch)["answers/copied_result"].value == float(copied)
