"""What the command line knows is known in Python too, and what is saved can be used as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolgrpo import ToolGRPOTrainer
from toolgrpo.errors import ConfigError
from toolgrpo.observe.records import read_episodes
from toolgrpo.testing import ByteChat, tiny_config, tiny_trainer
from toolgrpo.tools import load_tools, run_tool

ROWS = [{"prompt": f"What is {i} times 3?", "answer": 3 * i} for i in range(8)]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that was written as a notebook would: names, a list of rows, a function."""
    folder = tmp_path_factory.mktemp("saved")
    config = tiny_config(folder, engine="transformers", max_steps=1, max_completion_length=16)
    with ToolGRPOTrainer("nano", "accuracy", config, ROWS, tools=[multiply]) as trainer:
        assert trainer.reward_func_names == ["accuracy"]
        trainer.train()
        trainer.save_model()
    return folder


def test_a_named_model_and_reward_and_a_list_of_rows_train(saved: Path) -> None:
    episodes = read_episodes(saved / "episodes.jsonl")
    assert len(episodes) == 8 and {e["row"]["answer"] for e in episodes} <= {str(3 * i) for i in range(8)}


def test_tools_json_gives_the_prompt_of_the_training_and_a_function_another(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tools = json.loads((saved / "tools.json").read_text())
    episode = read_episodes(saved / "episodes.jsonl")[0]

    def prompt(tools: Any) -> list[int]:
        ids = tokenizer.apply_chat_template(episode["prompt"], tools=tools, add_generation_prompt=True)
        return list(ids["input_ids"])

    assert prompt(tools) == list(episode["prompt_ids"])
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.generate(torch.tensor([prompt(tools)]), max_new_tokens=8).shape[1] > len(prompt(tools))
    assert len(prompt([multiply])) > len(prompt(tools)), "Transformers describes the same function at more length"


def test_the_model_card_says_what_somebody_needs(saved: Path) -> None:
    card = (saved / "README.md").read_text()
    for text in (
        *("base model: `nano`", "accuracy (weight 1)", "8 rows with prompt, answer", "trained for 1 steps"),
        *("`multiply`: Multiply two integers.", "tools.json", "transformers 5", "library_name: transformers"),
    ):
        assert text in card, text


def say_end(request: Any, number: int) -> list[int]:
    return ByteChat.say("end" + "." * (number % 5))


def lengths(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(c[-1]["content"])) for c in completions]


def test_a_toolbox_that_was_given_stays_open_for_the_next_trainer(tmp_path: Path) -> None:
    with load_tools([multiply], workers=1) as box:
        for _ in range(2):
            with tiny_trainer(tmp_path, lengths, say_end, parts={"tools": box}, max_steps=1) as trainer:
                trainer.train()
        assert run_tool(box, {"name": "multiply", "arguments": {"a": 2, "b": 3}}).content == "6"


def test_a_trainer_that_cannot_be_made_leaves_no_worker(tmp_path: Path) -> None:
    import threading

    before = threading.enumerate()
    with pytest.raises(ConfigError, match="adapter"):
        tiny_trainer(tmp_path, lengths, None, parts={"tools": [multiply]}, vllm_lora_sync="adapter")
    assert not [one for one in threading.enumerate() if one.name == "toolgrpo-tools" and one not in before]
