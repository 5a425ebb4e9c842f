"""A model that is loaded for an evaluation or a replay is asked what the training asked it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from toolgrpo import ToolGRPOConfig, ToolGRPOTrainer
from toolgrpo.commands.arguments import ScriptArguments
from toolgrpo.commands.job import Job
from toolgrpo.commands.loaded_model import load_model
from toolgrpo.commands.terminal import Terminal
from toolgrpo.engines.base import SamplingOptions
from toolgrpo.rollout import RolloutBatch
from toolgrpo.trainer.assembly import open_player
from toolgrpo.trainer.config import ModelConfig

AGENT = """
async def run(client, row):
    await client.chat.completions.create(model="policy", messages=list(row["prompt"]), max_tokens=4)
    return 0.0
"""
QUESTION = [{"role": "user", "content": "What is 19 plus 23?"}]


def tokens(batch: RolloutBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(one.trajectory.prompt_ids), tuple(one.trajectory.ids)) for one in batch.episodes]


@pytest.mark.e2e
@pytest.mark.parametrize("row", [{"user_turns": ["And 2 more?"]}, {}], ids=["user_turns", "agent"])
def test_the_same_prompts_are_rendered_and_the_same_tokens_sampled(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [{"prompt": QUESTION, "answer": "42", **row}] * 2
    agent = None if row else tmp_path / "agent.py"
    if agent is not None:
        agent.write_text(AGENT)
    config = ToolGRPOConfig(
        str(tmp_path),
        chat_template_kwargs={"enable_thinking": False},
        **{"max_completion_length": 96, "max_turn_tokens": 8, "num_generations": 2, "per_device_train_batch_size": 2},
        **{"engine": "transformers", "report_to": "none", "use_cpu": True},
    )
    greedy = SamplingOptions(temperature=0.0)
    with ToolGRPOTrainer("nano", "accuracy", config, rows, agent=agent) as trainer:
        then = trainer.rollout(rows, greedy)
    job = Job(ScriptArguments(), config, ModelConfig(), Terminal(None, io.StringIO(), quiet=True))
    parts = load_model(job, trainer.model.config._name_or_path, player=open_player(agent, None, config))
    rollouts = parts.rollouts(parts.open_engine().engine)
    try:
        rollouts.engine.load_weights(parts.policy.weights())
        now = rollouts.run(rows, greedy)
    finally:
        rollouts.close()
    assert tokens(now) == tokens(then) and all(ids for _, ids in tokens(now))
    assert all(one.trajectory.failure is None for one in now.episodes)
