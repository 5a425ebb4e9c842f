"""Episodes in which users speak again, through a real training step: what is trained on is what the model said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainings import CREDIT_BY_TURN, run_to_end
from toolgrpo.engines.base import SampleRequest
from toolgrpo.errors import ChatFormatError
from toolgrpo.observe.records import read_episodes
from toolgrpo.report.episode_data import episode_texts
from toolgrpo.testing import ByteChat, ScriptedTools, tiny_trainer
from toolgrpo.trajectory import Trajectory

pytestmark = pytest.mark.e2e

ROWS = [{"prompt": f"q{i}", "answer": str(i), "user_turns": ["more"] if i % 2 else None} for i in range(8)]
ADD = {"add": lambda a, b: str(a + b)}


def script(request: SampleRequest, number: int) -> list[int]:
    return ByteChat.say("xyz"[: 1 + number % 3])


def test_rewards_the_loss_and_the_recording_know_what_users_said(tmp_path: Path) -> None:
    kept: list[Trajectory] = []

    def reward(completions: list[Any], trajectories: list[Trajectory], **_: Any) -> list[float]:
        kept.extend(trajectories)
        return [float(len(completion[-1]["content"])) for completion in completions]

    parts = {"tools": ScriptedTools(ADD)}
    run_to_end(tiny_trainer(tmp_path, reward, script, rows=ROWS, parts=parts, **CREDIT_BY_TURN))
    heard = [t for t in kept if len(t.turns) == 2]
    assert len(kept) == 16 and 0 < len(heard) < 16
    for trajectory in heard:
        assert [message["role"] for message in trajectory.messages] == ["assistant", "user", "assistant"]
        assert trajectory.n_context == len("|>user:more|>") - 1, "all but the end of the answer is given"
    records = read_episodes(tmp_path)
    assert {tuple(turn["user"] for turn in record["turns"]) for record in records} == {(None,), ("more", None)}
    assert {len(record["turn_advantages"]) for record in records} == {1, 2}
    assert {episode_texts(record)["turns"][0].get("u") for record in records} == {None, "more"}, "the report has it"


class WithoutUsers(ByteChat):
    """A format of somebody's own that knows no user in the middle."""

    def bridge(self, ids: Any, tool_messages: Any, **asked: Any) -> list[int]:
        if tool_messages[0]["role"] == "user":
            raise ChatFormatError("no users here")
        return super().bridge(ids, tool_messages, **asked)


def test_a_format_that_refuses_users_is_asked_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ChatFormatError, match="no users here"):
        tiny_trainer(tmp_path, lambda completions, **_: [0.0], script, rows=ROWS, chat=WithoutUsers())
