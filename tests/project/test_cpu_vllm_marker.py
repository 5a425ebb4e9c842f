"""Tests that need vLLM's build for CPUs carry one marker, so that the lock of a CUDA machine runs green too."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "needs_cpu_vllm"
ASKS_FOR_VLLM = {"vllm_colocate", "vllm_server", "VLLMServerProcess", "start_vllm"}
TRAINS = {"ToolGRPOTrainer", "tiny_trainer", "train_tiny", "launcher"}  # on the CPU, all of them
WITH_ANOTHER_BUILD = """
from toolgrpo.engines import vllm_options
vllm_options.vllm_is_for_cpu = lambda: False
"""


def files() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__):
            yield path, text


def unguarded(node: ast.AST) -> Iterator[ast.AST]:
    """All within a node but what it asks only where the build is for CPUs."""
    yield node
    for part in ast.iter_child_nodes(node):
        if not (isinstance(part, ast.IfExp) and "vllm_is_for_cpu" in ast.dump(part.test)):
            yield from unguarded(part)


def words_of(module: ast.Module, name: str) -> set[str]:
    """Every name and string of a function, with those of the functions and values of its module that it names."""
    defined = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    values = {
        target.id: node
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    left = [name]
    while left:
        at = left.pop()
        node = defined.get(at) or values.get(at)
        for part in unguarded(node) if node is not None else ():
            word = getattr(part, "id", None) or getattr(part, "arg", None) or getattr(part, "value", None)
            if isinstance(word, str) and word not in found:
                found.add(word)
                left.append(word)
    return found


def needing(text: str) -> list[str]:
    """The tests of a file that train on the CPU with a real vLLM and do not say so."""
    module = ast.parse(text)
    if "StandInVLLM" in text or re.search(rf"^pytestmark = .*{MARK}", text, re.MULTILINE):
        return []
    return [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and (words := words_of(module, node.name)) & ASKS_FOR_VLLM
        and words & TRAINS
        and MARK not in "".join(map(ast.dump, node.decorator_list))
    ]


def test_who_trains_on_the_cpu_with_vllm_says_so() -> None:
    assert {path.name: found for path, text in files() if (found := needing(text))} == {}


def test_no_marked_test_runs_with_another_build(tmp_path: Path) -> None:
    (tmp_path / "another_build.py").write_text(WITH_ANOTHER_BUILD)
    marked = min(
        (path for path, text in files() if f"@pytest.mark.{MARK}" in text), key=lambda path: path.stat().st_size
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "another_build", "-n0", "-m", MARK, str(marked)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert re.search(r"^\d+ skipped, (\d+ deselected, )?", done.stdout.splitlines()[-1]), done.stdout[-2000:]
