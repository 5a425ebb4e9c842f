"""What importing a light part must not drag in: a tool worker starts in well under a second because of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.lock

HEAVY = ("torch", "vllm", "trl", "transformers", "datasets", "accelerate", "deepspeed", "peft")
LIGHT = (
    "toolgrpo.trajectory",
    "toolgrpo.errors",
    "toolgrpo.chat",
    "toolgrpo.chat.format",
    "toolgrpo.chat.bridge_proof",
    "toolgrpo.tools",
    "toolgrpo.tools.workers.tool_worker",
    "toolgrpo.sandbox",
    "toolgrpo.sandbox.host.host",
    "toolgrpo.rollout",
    "toolgrpo.testing",
)


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == [], f"importing {module} imports {done.stdout.strip()}"
