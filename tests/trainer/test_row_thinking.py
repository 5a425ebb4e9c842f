"""A column `enable_thinking` decides for its row; without one the run's setting does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.testing import ByteChat, tiny_trainer
from toolgrpo.trajectory import Message


class TellingChat(ByteChat):
    """A format whose prompt says what it was asked for."""

    def prompt(
        self,
        messages: Sequence[Message],
        schemas: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        return [*super().prompt(messages, schemas), *f"thinking={enable_thinking}".encode()]


@pytest.mark.parametrize("of_run", [None, False, True])
def test_the_row_decides(tmp_path: Path, of_run: bool | None) -> None:
    trainer = tiny_trainer(
        tmp_path,
        lambda completions, **_: [0.0] * len(completions),
        lambda request, number: ByteChat.say("done"),
        chat=TellingChat(),
        enable_thinking=of_run,
    )
    rows = [{"prompt": "q", "enable_thinking": value} for value in (True, False, None)] + [{"prompt": "q"}]
    trajectories = trainer.rollout(rows).trajectories
    told = [ByteChat.text(trajectory.prompt_ids).rpartition("=")[2] for trajectory in trajectories]
    trainer.close()
    assert told == ["True", "False", str(of_run), str(of_run)]
