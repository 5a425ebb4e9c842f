"""Long runs: resident memory and open files stay flat after warm-up."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")]


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("steps", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_a_run_is_flat_from_its_second_fifth_to_its_last(tiny_qwen3: Any, tmp_path: Path, steps: int) -> None:
    """With real tool workers, the transformers engine, recording, and a checkpoint in every fifth step.

    A file that is open for a moment is no leak.
    """
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    saving = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}
    config = {"max_steps": steps, "use_cpu": True, **saving}
    job = {"out": str(tmp_path / "out"), "model": str(tmp_path / "model"), "engine": "transformers", "config": config}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), json.dumps(job)], cwd=ROOT, env=environment, check=True, timeout=5000)
    result = json.loads((tmp_path / "out" / "rank0.json").read_text())
    assert result["steps"] == steps
    early, late = slice(steps // 5, 2 * steps // 5), slice(4 * steps // 5, steps)
    rss_mib, files = result["rss_mib"], result["open_files"]
    most_mib = min(25, 0.625 * steps)  # in a short run a MiB a step
    assert statistics.median(rss_mib[late]) - statistics.median(rss_mib[early]) < most_mib, rss_mib
    assert min(files[late]) <= max(files[early]), files
