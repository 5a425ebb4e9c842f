"""Users who speak in the middle of an episode: from the row's script or the environment, within the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from toolgrpo.episode.dropped import DropCause, DropEpisode
from toolgrpo.episode.trajectory import StopReason, Trajectory
from toolgrpo.errors import DataError
from toolgrpo.evaluation.replaying import calls_again
from toolgrpo.report.episode_data import episode_texts
from toolgrpo.rollout.row_parts import users_speak
from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedTools, run_episode

pytestmark = pytest.mark.lock

CALL = 'call add {"a": 1, "b": 2}'
ADD = {"add": lambda a, b: str(a + b)}


def run(turns: Sequence[str], script: list[str] | None = None, **options: Any) -> Trajectory:
    engine = ScriptedEngine([ByteChat.say(turn) for turn in turns])
    options.setdefault("clock", FakeClock())
    row = {} if script is None else {"user_turns": script}
    return run_episode(engine, options.pop("tools", ScriptedTools(ADD)), row=row, **options)


def speaking(user: Callable[[str], str | None], **options: Any) -> ScriptedTools:
    return ScriptedTools(ADD, user=user, **options)


def test_a_script_is_said_turn_by_turn_and_is_context() -> None:
    trajectory = run([CALL, "3", "7", "bye"], ["and 4?", "thanks"])
    assert trajectory.stop_reason is StopReason.FINISHED
    assert ByteChat.text(trajectory.ids) == f"{CALL}|>tool:3|>3|>user:and 4?|>7|>user:thanks|>bye|"
    said = "".join(chr(token) if mask else "" for token, mask in zip(trajectory.ids, trajectory.mask, strict=True))
    assert said == f"{CALL}Ā3Ā7ĀbyeĀ", "what the user says is not trained on"
    assert [turn.user for turn in trajectory.turns] == [None, "and 4?", "thanks", None]
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant", "user", "assistant"]
    assert trajectory.messages[3] == {"role": "user", "content": "and 4?"}
    record = trajectory.to_record()
    assert Trajectory.from_record(record) == trajectory
    assert [turn.get("u") for turn in episode_texts(record)["turns"]] == [None, "and 4?", "thanks", None], "the report"


@pytest.mark.parametrize("script", [None, []])
def test_without_a_speaker_nothing_changes(script: list[str] | None) -> None:
    assert run([CALL, "3"], script) == run([CALL, "3"])


def test_an_environment_hears_each_answer_and_speaks_until_it_says_nothing() -> None:
    user = Mock(side_effect=lambda answer: None if answer == "7" else f"more than {answer}?")
    trajectory = run([CALL, "3", "7"], tools=speaking(user, reward=lambda row: 0.5))
    assert user.mock_calls == [call("3"), call("7")] and trajectory.reward == 0.5
    assert trajectory.messages[3] == {"role": "user", "content": "more than 3?"}
    assert trajectory.stop_reason is StopReason.FINISHED


@pytest.mark.parametrize(
    ("limits", "reason", "n_turns"),
    [
        ({"max_turns": 3}, StopReason.MAX_TURNS, 3),
        ({"max_user_turns": 2}, StopReason.MAX_USER_TURNS, 3),
        ({"max_user_turns": 1, "max_turns": 2}, StopReason.MAX_TURNS, 2),
        ({"max_completion_length": 20}, StopReason.LENGTH, 2),
        ({"max_completion_length": 3}, StopReason.LENGTH, 1),
    ],
)
def test_a_user_who_never_ends_is_ended_by_a_limit(limits: dict[str, int], reason: StopReason, n_turns: int) -> None:
    options: dict[str, Any] = {"max_turns": None, **limits}
    trajectory = run(["a"] * 20, tools=speaking(lambda answer: "more"), **options)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (reason, n_turns)
    assert trajectory.messages[-1]["role"] == "assistant", "what the model cannot read is not said"
    assert trajectory.turns[-1].user is None


def test_at_a_limit_a_user_with_nothing_more_to_say_has_finished() -> None:
    trajectory = run(["a", "b"], ["more"], max_turns=2, max_user_turns=1)
    assert trajectory.stop_reason is StopReason.FINISHED


def test_the_window_ends_an_episode_that_a_message_would_fill() -> None:
    room = len("tools:add>user:q|>a|>user:more|")
    engine = ScriptedEngine([ByteChat.say("a")], max_model_len=room + 1)
    trajectory = run_episode(engine, ScriptedTools(ADD), row={"user_turns": ["more"]}, clock=FakeClock())
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL and len(trajectory.messages) == 1


def test_the_deadline_covers_waiting_for_the_user() -> None:
    trajectory = run(["a"], tools=speaking(lambda answer: "more", delay_s=9.0), deadline_s=5.0)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert [turn.content for turn in trajectory.turns] == ["a"] and trajectory.duration_s == 5.0


def test_a_user_may_drop_the_episode() -> None:
    trajectory = run(["a"], tools=speaking(Mock(side_effect=DropEpisode("the customer hung up"))))
    assert trajectory.stop_reason is StopReason.DROPPED and len(trajectory.turns) == 1
    assert trajectory.dropped is not None and trajectory.dropped.cause is DropCause.ENVIRONMENT


def test_a_replay_tells_the_environment_what_it_heard() -> None:
    then = run([CALL, "3", "7"], tools=speaking(lambda answer: "more" if answer == "3" else None))
    user = Mock(side_effect=lambda answer: "more" if answer == "3" else "and more")
    again = calls_again(speaking(user, reward=lambda row: float(user.call_count)), {}, then)
    assert user.mock_calls == [call("3"), call("7")] and again.reward == 2.0
    said = [(one.turn, one.then, one.now) for one in again.answers if one.call is None]
    assert said == [(1, "more", "more"), (2, None, "and more")]


def test_what_a_limit_kept_from_the_model_is_no_difference() -> None:
    tools = speaking(lambda answer: "more")
    then = run(["a", "b"], tools=tools, max_turns=2)
    assert [one.turn for one in calls_again(tools, {}, then).answers] == [0]


def test_it_is_known_before_the_first_episode_who_will_speak() -> None:
    silent = speaking(lambda answer: None)
    assert users_speak(None, SimpleNamespace(column_names=("prompt", "user_turns"))) and users_speak(silent, None)
    assert not users_speak(ScriptedTools(ADD), [])
    with pytest.raises(DataError, match="both would write"):
        run(["a"], ["more"], tools=silent)
