"""What a run asks of colocated vLLM: a context that its own episodes need, and enough of them at a time; and the prompts that
fill the context window, which are found before the first step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import Qwen2Config, Qwen3Config

from toolgrpo.engines import build
from toolgrpo.engines.build import EngineOptions
from toolgrpo.engines.policy import Backend, Policy, kv_bytes_per_token
from toolgrpo.errors import ConfigError, DataError
from toolgrpo.rollout.demand import Demand, Prompts, Window, rows_that_fit, suit
from toolgrpo.testing import ByteChat, tiny_config, tiny_trainer

ROOT = Path(__file__).parents[2]
CHAT = ByteChat()
PROMPTS = Prompts(chat=CHAT, tools=None)


def small(positions: int = 40_960) -> Any:
    """A model as far as its config."""
    heads: dict[str, Any] = {"num_key_value_heads": 8, "num_attention_heads": 16, "head_dim": 128}
    return SimpleNamespace(config=Qwen3Config(num_hidden_layers=28, max_position_embeddings=positions, **heads))


def suited(
    monkeypatch: pytest.MonkeyPatch,
    rows: list[Mapping[str, Any]],
    heldout: list[Mapping[str, Any]] | None = None,
    *,
    device: str = "cuda",
    n_processes: int = 1,
    model: Any = None,
    max_model_len: int | None = None,
    **asked: Any,
) -> Demand:
    monkeypatch.setattr(build, "vllm_available", lambda: True)
    monkeypatch.setattr(build, "vllm_is_for_cpu", lambda: device == "cpu")
    policy = Policy(
        get_model=lambda: model or small(),
        weights=tuple,
        dtype=torch.bfloat16,
        device=torch.device(device),
        backend=Backend("MULTI_GPU" if n_processes > 1 else "NO", n_processes),
    )
    options = EngineOptions(max_rows=16, max_model_len=max_model_len)
    return suit(options, policy, rows, heldout or [], prompts=PROMPTS, **{"max_completion_length": 100, **asked})


def rows_of(*lengths: int) -> list[Mapping[str, Any]]:
    return [{"prompt": "x" * length} for length in lengths]


def prompt_tokens(length: int) -> int:
    return len(CHAT.prompt([{"role": "user", "content": "x" * length}], []))


def test_the_window_is_the_longest_prompt_and_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = suited(monkeypatch, rows_of(10, 500, 30))
    window = demand.options.max_model_len
    assert window is not None and 0 <= window - (prompt_tokens(500) + 100) < 64
    assert demand.line is not None
    assert f"{window} tokens: the longest prompt of {prompt_tokens(500)}" in demand.line
    assert f"({112 * window / 1024:.0f} MiB of cache)" in demand.line, "28 x 2 x 8 x 128 x 2 bytes are 112 KiB a token"


@pytest.mark.parametrize(
    ("given", "window"),
    [({"max_model_len": 77}, 77), ({"model": small(positions=400)}, None)],
    ids=["the user's own", "a model that cannot take as much"],
)
def test_a_window_that_is_known_stays_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], window: int | None
) -> None:
    demand = suited(monkeypatch, rows_of(500), **given)
    assert demand.options.max_model_len == window and demand.line is None


@pytest.mark.parametrize(
    ("given", "at_a_time"),
    [
        ({}, 200),  # all held-out episodes at once
        ({"n_processes": 8}, 25),  # this process's share of them
        ({"samples": 8}, 256),  # as many as one accelerator decodes well
        ({"max_concurrent": 16}, 16),  # the user's own bound
        ({"device": "cpu"}, 16),  # nothing is won by more on a CPU
    ],
)
def test_an_evaluation_is_not_bound_to_the_training_batch(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], at_a_time: int
) -> None:
    demand = suited(monkeypatch, rows_of(10), rows_of(*[10] * 200), **given)
    assert demand.options.max_rows == at_a_time


def test_the_cache_of_a_token() -> None:
    qwen25 = Qwen2Config(num_hidden_layers=24, num_key_value_heads=2, num_attention_heads=14, hidden_size=896)
    assert kv_bytes_per_token(qwen25, torch.float32) == 24 * 2 * 2 * 64 * 4
    latent = SimpleNamespace(num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=8)
    assert kv_bytes_per_token(latent, torch.float32) is None


def test_the_page_on_memory_says_what_the_recipes_say() -> None:
    page = (ROOT / "docs" / "how-to" / "scaling.md").read_text()
    section = page.partition("## Memory of the recipes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", section, re.MULTILINE)
    assert len(rows) >= 5
    for name, *numbers in rows:
        prompt, completion, context = (int(number.replace(",", "")) for number in numbers)
        recipe = yaml.safe_load((ROOT / "recipes" / "configs" / f"{name}.yaml").read_text())
        assert completion == recipe["generation"]["max_completion_length"], name
        assert context == Window(prompt, completion).tokens, name


def kept(rows: list[Mapping[str, Any]], policy: str, said: list[str]) -> list[str]:
    table = Dataset.from_list([*map(dict, rows)])
    return list(rows_that_fit(table, PROMPTS, 300, policy, "the training rows", said.append)["prompt"])


def test_rows_whose_prompts_fill_the_window_are_refused_with_row_and_length_or_skipped_and_said() -> None:
    said: list[str] = []
    with pytest.raises(DataError, match=rf"300 .*row 2 \({prompt_tokens(400)}"):
        kept(rows_of(5, 400, 100), "refuse", said)
    assert [*map(len, kept(rows_of(5, 400, 100), "skip", said))] == [5, 100]
    assert len(said) == 1 and "row 2" in said[0]
    with pytest.raises(DataError, match="nothing is left"):
        kept(rows_of(400), "skip", [])
    exactly = 300 - prompt_tokens(0)
    assert [*map(len, kept(rows_of(exactly, exactly - 1), "skip", []))] == [exactly - 1], (
        "it leaves no room for a token"
    )


def test_the_trainer_looks_before_it_trains(tmp_path: Path) -> None:
    rows = [*({"prompt": f"q{i}"} for i in range(8)), {"prompt": "x" * 50_000}]

    def start(**more: Any) -> Any:
        return tiny_trainer(tmp_path, lambda completions, **_: [0.0], lambda *_: ByteChat.say("end"), rows=rows, **more)

    with pytest.raises(DataError, match="row 9"):
        start()
    with start(long_prompts="skip") as trainer:
        assert len(trainer.train_dataset) == 8
    with pytest.raises(ConfigError, match="long_prompts"):
        tiny_config(tmp_path, long_prompts="cut")
