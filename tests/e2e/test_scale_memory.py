"""Long runs: resident memory and open files stay flat after warm-up."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"
PAGE = os.sysconf("SC_PAGESIZE")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def assert_flat(rss_mib: list[float], open_files: list[int], *, mib: float) -> None:
    """From the second third to the last tenth."""
    n = len(rss_mib)
    early, late = rss_mib[n // 3 : n // 2], rss_mib[-n // 10 :]
    assert statistics.median(late) - statistics.median(early) < mib, rss_mib[:: max(1, n // 20)]
    assert max(open_files[-n // 10 :]) <= max(open_files[n // 3 : n // 2]), open_files[:: max(1, n // 20)]


def test_a_short_run_is_flat(tiny_qwen3: Any, tmp_path: Path) -> None:
    """With real tool workers, the transformers engine, recording, and a checkpoint in every tenth step."""
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    saving = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
    config = {"max_steps": 60, "use_cpu": True, **saving}
    job = {"out": str(tmp_path / "out"), "model": str(tmp_path / "model"), "engine": "transformers", "config": config}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), json.dumps(job)], cwd=ROOT, env=environment, check=True, timeout=250)
    result = json.loads((tmp_path / "out" / "rank0.json").read_text())
    assert result["steps"] == 60
    assert_flat(result["rss_mib"], result["open_files"], mib=15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_steps_of_the_embedded_job_are_flat(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "toolgrpo.nano"], cwd=ROOT, check=True, timeout=900)
    command = [
        *(sys.executable, "recipes/train.py", "--config", "recipes/configs/nano.yaml", "--output_dir", str(tmp_path)),
        *("--max_steps", "500", "--per_device_train_batch_size", "16", "--eval_questions", "0"),
    ]
    rss_mib: list[float] = []
    open_files: list[int] = []
    with (tmp_path / "stdout.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        proc = Path("/proc") / str(process.pid)
        log = tmp_path / "train.log"
        while process.poll() is None:
            time.sleep(1)
            if process.poll() is None and log.exists() and "grad_norm" in log.read_text(errors="replace")[:20_000]:
                rss_mib.append(int((proc / "statm").read_text().split()[1]) * PAGE / 2**20)
                open_files.append(len(list((proc / "fd").iterdir())))
    assert process.returncode == 0, (tmp_path / "stdout.txt").read_text()[-3000:]
    assert len(rss_mib) > 60
    assert_flat(rss_mib, open_files, mib=40)
