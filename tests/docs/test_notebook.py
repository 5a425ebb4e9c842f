"""Notebooks run cell by cell in a real Jupyter kernel, with fewer steps, and their stored outputs are those of their code."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
from tests.support.notebook_kernel import NotebookKernel

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "recipes" / "shop"
STORED = sorted((ROOT / "recipes" / "notebooks").glob("*.ipynb"))
FEWER = {r"(STEPS(?:_OF_SFT)? =|--max_steps) \d+": r"\1 1", r"--eval_questions \d+": "--eval_questions 2"}
FEWER |= {r"--samples \d": "--samples 1", r"toolgrpo (train|evaluate|check|chat) ": r"\g<0>--engine transformers "}


def code_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed_by(path: Path, folder: Path, *, until: int | None = None) -> list[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = []
    with NotebookKernel(folder, env, timeout_s=900.0) as kernel:
        for cell in code_of(path)[:until]:
            text = "".join(cell["source"])
            for pattern, fewer in FEWER.items():
                text = re.sub(pattern, fewer, text)
            printed.append(kernel.run(text))
    return printed


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_notebook_of_the_shop(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    shutil.copytree(SHOP, folder)
    printed = printed_by(folder / "half_an_hour.ipynb", folder)
    assert "408 questions to train on" in printed[0]
    assert printed[1].startswith("83\n") and "missing parameter 'quantity'" in printed[1]
    assert (folder / "outputs" / "shop" / "model.safetensors").exists()
    assert "assistant" in printed[-1]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path, tmp_path: Path) -> None:
    """`NotebookKernel.run` raises if a cell does, and a cell of commands does if its last command fails."""
    printed = printed_by(path, tmp_path)
    assert [bool(text) for text in printed] == [bool(cell["outputs"]) for cell in code_of(path)]


@pytest.mark.e2e
def test_a_run_is_read_in_a_notebook(tmp_path: Path) -> None:
    printed = printed_by(ROOT / "recipes" / "notebooks" / "read_a_run.ipynb", tmp_path, until=5)
    assert "before greedy" in printed[1] and "8 groups, 64 episodes" in printed[2] and "2 of 64 episodes" in printed[3]
    assert re.search(r"length +\d+ episodes", printed[4])


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_the_code_and_name_no_folder_of_the_machine(path: Path) -> None:
    cells = code_of(path)
    stored = json.loads(path.read_text("utf-8"))["metadata"]["code_crc32"]
    same = runpy.run_path(str(ROOT / ".ci" / "notebooks"))["code_crc32"](cells)
    assert stored == same, f"{path.name} was changed after it ran: .ci/notebooks {path.stem}"
    text = "".join(line for cell in cells for output in cell["outputs"] for line in output["text"])
    assert text and not re.search(r"\x1b|\r|/(home|tmp|work|root|Users)/", text)
