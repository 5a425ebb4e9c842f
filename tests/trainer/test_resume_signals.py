"""Signals to a real training process, and to the train command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "fixtures" / "scale" / "train_tiny.py"


class Process:
    """A process whose lines can be waited for."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.seen = ""

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        watchdog = threading.Timer(200, self.process.kill)
        watchdog.start()
        try:
            while text not in self.seen:
                line = self.process.stdout.readline()
                assert line, f"it ended without saying {text!r}:\n{self.seen[-3000:]}"
                self.seen += line
        finally:
            watchdog.cancel()

    def end(self) -> int:
        out, _ = self.process.communicate(timeout=200)
        self.seen += out
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_the_second_signal_ends_the_run_at_once(tiny_qwen3: Any, tmp_path: Path, number: signal.Signals) -> None:
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    config = {"max_steps": 50, "use_cpu": True, "save_strategy": "steps", "save_steps": 1}
    job = {"out": str(tmp_path / "out"), "model": str(tmp_path / "model"), "config": config, "pause_s": 150.0}
    run = Process([sys.executable, str(SCRIPT), json.dumps(job)])
    while not (tmp_path / "out" / "steps0.txt").exists():  # it is in the first step, and stays there
        assert run.process.poll() is None
        threading.Event().wait(0.1)
    run.process.send_signal(number)
    run.wait_for("a second signal")
    run.process.send_signal(number)
    assert run.end() == -number, "ended by the signal, not by itself"
    assert complete_checkpoints(tmp_path / "out") == []
