"""What a run asks of colocated vLLM: a context that its own episodes need, and enough of them at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen3Config

from toolgrpo.engines import build
from toolgrpo.engines.build import EngineOptions
from toolgrpo.engines.policy import Backend, Policy, kv_bytes_per_token
from toolgrpo.rollout.demand import Demand, Prompts, Window, suit
from toolgrpo.testing.chat import ByteChat

ROOT = Path(__file__).parents[2]
CHAT = ByteChat()


class Shape:
    """A model as far as its config."""

    def __init__(self, config: Any) -> None:
        self.config = config


def small(positions: int = 40_960) -> Shape:
    return Shape(
        Qwen3Config(
            num_hidden_layers=28,
            num_key_value_heads=8,
            num_attention_heads=16,
            head_dim=128,
            max_position_embeddings=positions,
        )
    )


def suited(
    monkeypatch: pytest.MonkeyPatch,
    rows: list[Mapping[str, Any]],
    heldout: list[Mapping[str, Any]] | None = None,
    *,
    device: str = "cuda",
    n_processes: int = 1,
    model: Shape | None = None,
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
    prompts = Prompts(chat=CHAT, tools=None)
    return suit(options, policy, rows, heldout or [], prompts=prompts, **{"max_completion_length": 100, **asked})


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
    ("device", "n_processes", "samples", "max_concurrent", "at_a_time"),
    [
        ("cuda", 1, 1, None, 200),  # all held-out episodes at once
        ("cuda", 8, 1, None, 25),  # this process's share of them
        ("cuda", 1, 8, None, 256),  # as many as one accelerator decodes well
        ("cuda", 1, 1, 16, 16),  # the user's own bound
        ("cpu", 1, 1, None, 16),  # nothing is won by more on a CPU
    ],
)
def test_an_evaluation_is_not_bound_to_the_training_batch(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    n_processes: int,
    samples: int,
    max_concurrent: int | None,
    at_a_time: int,
) -> None:
    demand = suited(
        monkeypatch,
        rows_of(10),
        rows_of(*[10] * 200),
        device=device,
        n_processes=n_processes,
        samples=samples,
        max_concurrent=max_concurrent,
    )
    assert demand.options.max_rows == at_a_time


def test_the_cache_of_a_token() -> None:
    qwen25 = Qwen2Config(num_hidden_layers=24, num_key_value_heads=2, num_attention_heads=14, hidden_size=896)
    assert kv_bytes_per_token(qwen25, torch.float32) == 24 * 2 * 2 * 64 * 4
    latent = type("Latent", (), {"num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 8})()
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
