"""The notebook of the shop runs from its first cell to its last in a real Jupyter kernel, with fewer steps."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
from tests.support.notebook_kernel import NotebookKernel

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

SHOP = Path(__file__).parents[2] / "recipes" / "shop"
FEWER = {"STEPS_OF_SFT = 90": "STEPS_OF_SFT = 2", "STEPS = 100": "STEPS = 1"}


def test_the_notebook_of_the_shop(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    shutil.copytree(SHOP, folder)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = []
    notebook = json.loads((SHOP / "half_an_hour.ipynb").read_text())
    left = dict(FEWER)
    with NotebookKernel(folder, env, timeout_s=900.0) as kernel:
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            assert not cell["outputs"], "what a machine once printed does not belong into the file"
            text = "".join(cell["source"])
            for old in [old for old in left if old in text.splitlines()]:
                text = text.replace(old, left.pop(old))
            printed.append(kernel.run(text))
    assert not left, f"the notebook has no line {left}"
    assert "408 questions to train on" in printed[0]
    assert printed[1].startswith("83\n") and "missing parameter 'quantity'" in printed[1]
    assert (folder / "outputs" / "shop" / "model.safetensors").exists()
    assert "assistant" in printed[-1]
