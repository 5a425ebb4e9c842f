"""What the guide says of the builders: an episode over fakes, and a trainer that really trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from toolgrpo.testing import ByteChat, FakeClock, ScriptedEngine, ScriptedTools, run_episode, tiny_qwen3, tiny_trainer
from toolgrpo.trajectory import StopReason

CALL = 'call add {"a": 1, "b": 2}'


def test_an_episode_runs_under_its_limits_and_leaves_the_engine_closed() -> None:
    engine = ScriptedEngine([ByteChat.say(CALL), ByteChat.say("3")])
    tools = ScriptedTools({"add": lambda a, b: str(a + b)}, observation=lambda row: f" ({row['hint']})")
    trajectory = run_episode(engine, tools, question="How many?", row={"hint": "few"}, clock=FakeClock(), max_turns=1)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and not engine.is_open
    assert "user:How many? (few)" in ByteChat.text(trajectory.prompt_ids)


def test_a_tiny_trainer_learns_from_what_its_script_says(tmp_path: Path) -> None:
    def by_number(completions: list[Any], **_: Any) -> list[float]:
        return [float(number % 3) for number in range(len(completions))]

    trainer = tiny_trainer(tmp_path, by_number, lambda _, number: ByteChat.say("a" * (number % 3 + 1)), max_steps=1)
    trainer.train()
    trainer.close()
    assert trainer.state.global_step == 1
    weights = zip(trainer.model.parameters(), tiny_qwen3().parameters(), strict=True)
    assert any(not torch.equal(trained, fresh) for trained, fresh in weights)
