"""Prompts that fill the context window are found before the first step."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from toolgrpo.errors import ConfigError, DataError
from toolgrpo.rollout.demand import Prompts, rows_that_fit
from toolgrpo.testing import ByteChat, tiny_config, tiny_trainer

PROMPTS = Prompts(chat=ByteChat(), tools=None)
ROWS = Dataset.from_list([{"prompt": "short"}, {"prompt": "x" * 400}, {"prompt": "y" * 100}])


def kept(rows: Any, policy: str, said: list[str]) -> list[str]:
    return list(rows_that_fit(rows, PROMPTS, 300, policy, "the training rows", said.append)["prompt"])


def test_they_are_refused_with_row_and_length() -> None:
    length = len(ByteChat().prompt([{"role": "user", "content": "x" * 400}], []))
    with pytest.raises(DataError, match=rf"300 .*row 2 \({length}"):
        kept(ROWS, "refuse", [])


def test_or_skipped_and_said() -> None:
    said: list[str] = []
    assert [text[:1] for text in kept(ROWS, "skip", said)] == ["s", "y"]
    assert len(said) == 1 and said[0].endswith("left out") and "row 2" in said[0]
    with pytest.raises(DataError, match="nothing is left"):
        kept(ROWS.select([1]), "skip", [])


def test_a_prompt_of_exactly_the_window_leaves_no_room() -> None:
    stub = len(ByteChat().prompt([{"role": "user", "content": ""}], []))
    rows = Dataset.from_list([{"prompt": "x" * (300 - stub)}, {"prompt": "x" * (299 - stub)}])
    assert len(kept(rows, "skip", [])) == 1


def test_the_trainer_looks_before_it_trains(tmp_path: Any) -> None:
    rows = [{"prompt": f"q{i}"} for i in range(8)] + [{"prompt": "x" * 50_000}]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(DataError, match="row 9"):
        tiny_trainer(tmp_path, reward, lambda request, number: ByteChat.say("end"), rows=rows)
    with tiny_trainer(
        tmp_path, reward, lambda request, number: ByteChat.say("end"), rows=rows, long_prompts="skip"
    ) as trainer:
        assert len(trainer.train_dataset) == 8
    with pytest.raises(ConfigError, match="long_prompts"):
        tiny_config(tmp_path, long_prompts="cut")
