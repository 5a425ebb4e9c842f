"""`recipes/sft.py` from the command line to a model that has learnt, on a miniature of nano."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.nano.demonstrations import demonstrate, draw_training_problem
from recipes.nano.toolsets import CANONICAL
from recipes.nano.training import SupervisedLoss, collate
from toolgrpo.chat.encoding import spelled_markers
from toolgrpo.sft.encoder import ConversationEncoder

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def _sft(*flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "recipes" / "sft.py"), *flags]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_a_chat_model_learns_conversations_and_can_be_loaded(mini_nano: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [demonstrate(draw_training_problem(rng, 1), CANONICAL, rng, None) for _ in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    done = _sft(
        *("--model_name_or_path", str(mini_nano), "--dataset_id_or_path", str(tmp_path / "rows.jsonl")),
        *("--tools_script", "arithmetic", "--output_dir", str(tmp_path / "out")),
        *("--max_steps", "12", "--batch_size", "8", "--micro_batch_size", "4", "--learning_rate", "0.01"),
        *("--call_markers", "spelled"),
    )
    assert done.returncode == 0, done.stderr
    assert "<tool_call> and </tool_call>" in done.stderr and "in ordinary pieces" in done.stderr
    assert "<tool_call>" in spelled_markers(AutoTokenizer.from_pretrained(tmp_path / "out"))
    assert (
        "24 conversations" in done.stderr and "to learn, 12 steps on" in done.stderr and "step 12 of 12" in done.stderr
    )
    assert "shards" not in done.stderr, "the bars of a library are not ours"
    losses = []
    for folder in (mini_nano, tmp_path / "out"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        examples = [ConversationEncoder(tokenizer)(row, [tool.schema for tool in CANONICAL]) for row in rows]
        model = AutoModelForCausalLM.from_pretrained(folder)
        losses.append(SupervisedLoss(model)(collate(examples, tokenizer.pad_token_id)).item())
    assert losses[1] < 0.7 * losses[0]
