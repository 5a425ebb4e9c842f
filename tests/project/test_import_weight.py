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
LIGHT = (
    (
        PLAIN,
        ("episode.tool_calls", "episode.trajectory", "errors", "chat", "chat.format", "chat.bridge_proof", "tools"),
    ),
    (WORKER, ("tools.workers.supervisor", "tools.workers.tool_worker")),
    (TRAINING | SDK, ("tools.open_toolbox",)),
    (TRAINING, ("sandbox", "rollout", "report.build", "testing")),
)


@pytest.mark.parametrize(("forbidden", "modules"), LIGHT)
def test_light_modules_import_nothing_heavy(forbidden: set[str], modules: tuple[str, ...]) -> None:
    names = [f"toolgrpo.{module}" for module in modules]
    script = f"""
import importlib, sys
for name in {names!r}:  # each as the first
    for known in [one for one in sys.modules if one.partition(".")[0] == "toolgrpo"]:
        del sys.modules[known]
    importlib.import_module(name)
print(*{{name.partition(".")[0] for name in sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    loaded = set(done.stdout.split())
    assert "toolgrpo" in loaded
    assert loaded & forbidden == set(), f"one of {names} imports what it must not"
