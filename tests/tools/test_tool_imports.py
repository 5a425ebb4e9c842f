"""A tool worker starts in well under a second because of what it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "vllm", "datasets", "accelerate", "mcp", "jsonschema", "httpx", "numpy")


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_worker_imports_nothing_heavy() -> None:
    loaded = loaded_by("import toolgrpo.tools.workers.supervisor, toolgrpo.tools")
    assert "toolgrpo" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("heavy", ["torch", "transformers", "trl", "vllm", "mcp"])
def test_loading_tools_imports_no_trainer_and_no_sdk(heavy: str) -> None:
    assert heavy not in _LOADED


_LOADED = loaded_by("import toolgrpo.tools.open_toolbox")
