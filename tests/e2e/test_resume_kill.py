"""SIGKILL at random moments, again and again: the run that was resumed after each of them is the run that never was killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.observe.recorder import read_episodes
from toolgrpo.trainer.checkpoint_files import complete_checkpoints

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "tests" / "fixtures" / "scale" / "kill_loop.py"


def check(tiny_qwen3: Any, folder: Path, *, n_kills: int, steps: int, timeout_s: int = 280) -> list[int]:
    """The step of each kill, after everything else was compared."""
    tiny_qwen3(0).save_pretrained(folder / "model")
    config = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "use_cpu": True}
    job = {"out": str(folder), "model": str(folder / "model"), "config": config, "pause_s": 0.05}
    done = subprocess.run(
        [sys.executable, str(LOOP), json.dumps(job), str(n_kills), "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    whole, killed = (json.loads((folder / name / "rank0.json").read_text()) for name in ("whole", "killed"))
    assert killed["steps"] == whole["steps"] == steps and max(whole["grad_norms"]) > 0
    for key in ("losses", "grad_norms", "rewards", "weights", "n_episodes"):
        assert killed[key] == whole[key], key

    def log(name: str) -> list[Any]:
        records = read_episodes(folder / name / "episodes.jsonl")
        return [(r["step"], r["metadata"]["episode"], r["ids"], r["logprobs"], r["reward_given"]) for r in records]

    assert log("killed") == log("whole")
    assert [c.step for c in complete_checkpoints(folder / "killed")] == [steps - 1, steps]
    killed_at: list[int] = json.loads(done.stdout.splitlines()[-1])["killed_at"]
    return killed_at


@pytest.mark.timeout(300)
def test_a_run_killed_at_random_moments_loses_nothing(tiny_qwen3: Any, tmp_path: Path) -> None:
    killed_at = check(tiny_qwen3, tmp_path, n_kills=4, steps=12)
    assert killed_at, "no attempt was killed before it ended"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_kills(tiny_qwen3: Any, tmp_path: Path) -> None:
    killed_at = check(tiny_qwen3, tmp_path, n_kills=60, steps=300, timeout_s=1400)
    assert len(killed_at) >= 50
