"""The second signal to a real training process. The first one: `test_resume_trainer.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"


def test_the_second_signal_ends_the_run_at_once(tiny_model: Path, tmp_path: Path) -> None:
    config = {"max_steps": 50, "use_cpu": True, "save_strategy": "steps", "save_steps": 1}
    job = {"out": str(tmp_path / "out"), "model": str(tiny_model), "config": config, "pause_s": 150.0}
    run = subprocess.Popen(
        [sys.executable, str(SCRIPT), json.dumps(job)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not (tmp_path / "out" / "steps0.txt").exists():  # it is in the first step, and stays there
            assert run.poll() is None
            threading.Event().wait(0.1)
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None and any("a second signal" in line for line in run.stdout)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == -signal.SIGINT, "ended by the signal, not by itself"
    assert complete_checkpoints(tmp_path / "out") == []
