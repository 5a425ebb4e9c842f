"""Trajectories and chat formats know nothing of the trainer: what they import is all they can use."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "trl", "vllm", "datasets", "accelerate", "numpy", "pydantic", "mcp"}


@pytest.mark.parametrize(
    "modules", ["toolgrpo.trajectory", "toolgrpo.chat, toolgrpo.chat.format, toolgrpo.chat.bridge_proof"]
)
def test_nothing_heavy_is_imported(modules: str) -> None:
    code = f"import sys, {modules}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "toolgrpo" in loaded
    assert not HEAVY & set(loaded)
