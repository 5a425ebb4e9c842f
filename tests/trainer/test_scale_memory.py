"""Long runs: resident memory and open files stay flat after warm-up."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"
PAGE = os.sysconf("SC_PAGESIZE")

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")]


@dataclass(frozen=True)
class Moment:
    """What a run holds: MiB of its process and of its tool workers, and open files."""

    step: int
    rss_mib: float
    tools_mib: float
    open_files: int


def assert_flat(seen: list[Moment], *, mib: float) -> None:
    """From the second fifth of the steps to the last; a file that is open for a moment is no leak."""
    fifth = seen[-1].step / 5
    early, late = ([m for m in seen if n * fifth < m.step <= (n + 1) * fifth] for n in (1, 4))
    shown = "\n".join(str(moment) for moment in seen[:: max(1, len(seen) // 50)])
    for name in ("rss_mib", "tools_mib"):
        before, after = (statistics.median(getattr(m, name) for m in part) for part in (early, late))
        assert after - before < mib, f"{name} grew from {before:.1f} to {after:.1f}\n{shown}"
    assert min(m.open_files for m in late) <= max(m.open_files for m in early), shown


@pytest.mark.timeout(900)
def test_a_short_run_is_flat(tiny_qwen3: Any, tmp_path: Path) -> None:
    """With real tool workers, the transformers engine, recording, and a checkpoint in every tenth step."""
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    saving = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
    config = {"max_steps": 60, "use_cpu": True, **saving}
    job = {"out": str(tmp_path / "out"), "model": str(tmp_path / "model"), "engine": "transformers", "config": config}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), json.dumps(job)], cwd=ROOT, env=environment, check=True, timeout=800)
    result = json.loads((tmp_path / "out" / "rank0.json").read_text())
    assert result["steps"] == 60
    moments = zip(result["rss_mib"], result["open_files"], strict=True)
    assert_flat([Moment(i + 1, rss, 0.0, files) for i, (rss, files) in enumerate(moments)], mib=25)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_five_hundred_steps_of_the_embedded_job_are_flat(tmp_path: Path) -> None:
    """From outside, as a monitor sees it; what it read is left in `memory.json` in the folder of the run."""
    command = [
        *(sys.executable, "recipes/train.py", "--config", "recipes/configs/nano.yaml", "--output_dir", str(tmp_path)),
        *("--max_steps", "500", "--per_device_train_batch_size", "16", "--eval_questions", "0"),
    ]
    seen: list[Moment] = []
    with (tmp_path / "stdout.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(0.5)
                step = steps_done(tmp_path / "train.log")
                if step:
                    with contextlib.suppress(OSError):  # it has just ended
                        seen.append(look_at(process.pid, step))
        finally:
            process.kill()
    (tmp_path / "memory.json").write_text(json.dumps([asdict(moment) for moment in seen]))
    assert process.returncode == 0, (tmp_path / "stdout.txt").read_text()[-3000:]
    while_training = [moment for moment in seen if moment.step < 500]  # then the model is saved
    assert while_training[-1].step > 450 and len({moment.step for moment in while_training}) > 100
    assert_flat(while_training, mib=25)


def steps_done(log: Path) -> int:
    """The trainer logs each step."""
    return log.read_text(errors="replace").count("'grad_norm'") if log.exists() else 0


def look_at(pid: int, step: int) -> Moment:
    proc = Path("/proc") / str(pid)
    return Moment(step, rss_mib(pid), sum(map(rss_mib, descendants(pid))), len(list((proc / "fd").iterdir())))


def rss_mib(pid: int) -> float:
    return int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * PAGE / 2**20


def descendants(pid: int) -> list[int]:
    threads = (Path("/proc") / str(pid) / "task").iterdir()
    children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return [*children, *(later for child in children for later in descendants(child))]
