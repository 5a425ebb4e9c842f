"""In Python: what the command line knows is known too, what is saved is used as it was trained, an observer hears of all."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.trainings import KeptBatches, by_length, call_and_answer, run_to_end, step_logs, varied
from toolgrpo import ToolGRPOTrainer
from toolgrpo.episode.tool_calls import ToolErrorKind, ToolResult
from toolgrpo.errors import ConfigError
from toolgrpo.observe.records import read_episodes
from toolgrpo.rollout import RolloutBegan
from toolgrpo.testing import ScriptedTools, tiny_config, tiny_trainer
from toolgrpo.tools import load_tools, run_tool

ROWS = [{"prompt": f"What is {i} times 3?", "answer": 3 * i} for i in range(8)]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def test_what_a_notebook_gives_trains_and_what_it_saves_is_used_as_it_was_trained(tmp_path: Path) -> None:
    """A name of a model and of a reward, a list of rows, and a function as its tool."""
    config = tiny_config(tmp_path, engine="transformers", max_steps=1, max_completion_length=16)
    with ToolGRPOTrainer("nano", "accuracy", config, ROWS, tools=[multiply]) as trainer:
        assert trainer.reward_func_names == ["accuracy"]
        trainer.train()
        trainer.save_model()
    episodes = read_episodes(tmp_path / "episodes.jsonl")
    assert len(episodes) == 8 and {e["row"]["answer"] for e in episodes} <= {str(3 * i) for i in range(8)}

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tools = json.loads((tmp_path / "tools.json").read_text())

    def prompt(tools: Any) -> list[int]:
        ids = tokenizer.apply_chat_template(episodes[0]["prompt"], tools=tools, add_generation_prompt=True)
        return list(ids["input_ids"])

    assert prompt(tools) == list(episodes[0]["prompt_ids"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generate(torch.tensor([prompt(tools)]), max_new_tokens=8).shape[1] > len(prompt(tools))
    assert len(prompt([multiply])) > len(prompt(tools)), "Transformers describes the same function at more length"

    card = (tmp_path / "README.md").read_text()
    for text in (
        *("base model: `nano`", "accuracy (weight 1)", "8 rows with prompt, answer", "trained for 1 steps"),
        *("`multiply`: Multiply two integers.", "tools.json", "transformers 5", "library_name: transformers"),
    ):
        assert text in card, text


def test_a_toolbox_that_was_given_stays_open_for_the_next_trainer(tmp_path: Path) -> None:
    with load_tools([multiply], workers=1) as box:
        for _ in range(2):
            with tiny_trainer(tmp_path, by_length, varied, parts={"tools": box}, max_steps=1) as trainer:
                trainer.train()
        assert run_tool(box, {"name": "multiply", "arguments": {"a": 2, "b": 3}}).content == "6"


def test_a_trainer_that_cannot_be_made_leaves_no_worker(tmp_path: Path) -> None:
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="adapter"):
        tiny_trainer(tmp_path, by_length, None, parts={"tools": [multiply]}, vllm_lora_sync="adapter")
    assert not [one for one in threading.enumerate() if one.name == "toolgrpo-tools" and one not in before]


class Listener(KeptBatches):
    """Hears of rollouts and of its end, too; of episodes and turns: tests/rollout/test_rollouts.py."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def rollout_began(self, event: RolloutBegan) -> None:
        self.heard.append((event.n_episodes, event.step, event.mode))

    def close(self) -> None:
        self.heard.append("closed")


def test_an_observer_of_the_user_hears_of_all_that_is_trained_on(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "observers.md").read_text()
    names: dict[str, Any] = {}
    exec(guide.partition("```python\n")[2].partition("```")[0], names)
    listener, failed = Listener(), names["FailedCalls"]()
    tools = ScriptedTools({"add": lambda a, b: ToolResult("no", "add", ToolErrorKind.RAISED)})
    parts = {"tools": tools, "observers": [listener, failed]}
    running = run_to_end(tiny_trainer(tmp_path, by_length, call_and_answer, parts=parts))
    assert listener.heard == [(8, 0, "train"), (8, 1, "train"), "closed"]
    first, second = listener.batches
    assert [len(group) for group in first.groups()] == [4, 4]
    assert all(len({one.row["answer"] for one in group}) == 1 for batch in listener.batches for group in batch.groups())
    recorded = read_episodes(tmp_path / "episodes.jsonl")
    assert [line["reward_given"] for line in recorded] == [*first.totals, *second.totals]
    assert [line["metadata"]["episode"] for line in recorded] == list(range(16))
    for episode in (*first.episodes, *second.episodes):
        assert episode.rewards == {"by_length": episode.total}
        assert episode.success == (episode.total is not None and episode.total >= 1.0)
    for log, batch in zip(step_logs(running), listener.batches, strict=True):
        assert log["success"] == sum(batch.successes) / 8
        assert log["reward/max"] == max(total for total in batch.totals if total is not None)
    seen = [(step, number, content) for step, number, _, content in failed.seen]
    assert sorted(seen) == [(step, number, "no") for step in range(2) for number in range(8)]
