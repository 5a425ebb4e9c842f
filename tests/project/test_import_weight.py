"""What importing a light part must not drag in: a tool worker starts in well under a second because of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.lock

TRAINING = {"torch", "vllm", "trl", "transformers", "datasets", "accelerate", "deepspeed", "peft"}
SDK = {"mcp"}
WORKER = TRAINING | SDK | {"numpy", "jsonschema", "httpx", "aiohttp"}  # it has pydantic, to convert arguments
PLAIN = WORKER | {"pydantic"}  # next to nothing but the standard library
LIGHT = {
    "toolgrpo.episode.tool_calls": PLAIN,
    "toolgrpo.episode.trajectory": PLAIN,
    "toolgrpo.errors": PLAIN,
    "toolgrpo.chat": PLAIN,
    "toolgrpo.chat.format": PLAIN,
    "toolgrpo.chat.bridge_proof": PLAIN,
    "toolgrpo.tools": PLAIN,
    "toolgrpo.tools.workers.supervisor": WORKER,
    "toolgrpo.tools.workers.tool_worker": WORKER,
    "toolgrpo.tools.open_toolbox": TRAINING | SDK,
    "toolgrpo.sandbox": TRAINING,
    "toolgrpo.rollout": TRAINING,
    "toolgrpo.report.build": TRAINING,
    "toolgrpo.testing": TRAINING,
}


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    loaded = set(done.stdout.split())
    assert "toolgrpo" in loaded
    assert loaded & LIGHT[module] == set(), f"importing {module} imports what it must not"
