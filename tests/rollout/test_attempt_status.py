"""Every attempt of an episode gets one status and one tool message, the malformed and the impossible ones too."""

from __future__ import annotations

from pathlib import Path

from toolgrpo.calls import AttemptStatus
from toolgrpo.testing import ByteChat, ScriptedEngine, run_episode
from toolgrpo.tools import load_tools

MATH = Path(__file__).parents[2] / "tools_funcs" / "arithmetic_tools.py"
SAID = 'call add {"a": 1, "b": 2}\ncall ad {"a": 1}\ncall add {"a": "one", "b": 2}\ncall add {\ncall'


def test_each_attempt_has_its_status_and_its_message() -> None:
    engine = ScriptedEngine([ByteChat.say(SAID), ByteChat.say("done")])
    with load_tools(MATH, workers=1) as tools:
        trajectory = run_episode(engine, tools, max_completion_length=4000)
    assert [attempt.status for attempt in trajectory.attempts] == [
        AttemptStatus.OK,
        AttemptStatus.UNKNOWN_TOOL,
        AttemptStatus.BAD_ARGUMENTS,
        AttemptStatus.INVALID_JSON,
        AttemptStatus.MISSING_NAME,
    ]
    answers = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert answers == [result.content for result in trajectory.results]
    says = (
        "3",
        "did you mean 'add'?",
        "parameter 'a' must be",
        "Expecting property name",
        "a call is `call NAME JSON`",
    )
    for answer, part in zip(answers, says, strict=True):
        assert part in answer
    impossible = trajectory.attempts[2]
    assert impossible.arguments == {"a": "one", "b": 2} and impossible.detail == answers[2]
