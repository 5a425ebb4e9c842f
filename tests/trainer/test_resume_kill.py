"""SIGKILL at random moments, again and again: the run that was resumed after each of them is the run that never was killed.

And the second SIGINT to a real training process. The first one: `test_resume_trainer.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolgrpo.observe.recorder import episodes_path
from toolgrpo.observe.records import read_episodes
from toolgrpo.trainer.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "tests" / "fixtures" / "scale" / "kill_loop.py"


def assert_same_run(killed: Path, whole: Path, *, steps: int, process: int = 0) -> None:
    """One process's share of two runs: results, weights, and the log of episodes."""
    one, other = (json.loads((out / f"rank{process}.json").read_text()) for out in (killed, whole))
    assert one["steps"] == other["steps"] == steps and max(other["grad_norms"]) > 0
    for key in ("losses", "grad_norms", "rewards", "weights", "n_episodes"):
        assert one[key] == other[key], key

    def log(out: Path) -> list[Any]:
        records = read_episodes(episodes_path(out, process))
        return [(r["step"], r["metadata"]["episode"], r["ids"], r["logprobs"], r["reward_given"]) for r in records]

    assert log(killed) == log(whole)


def check(tiny_qwen3: Any, folder: Path, *, n_kills: int, steps: int, timeout_s: int = 580) -> list[int]:
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
    assert_same_run(folder / "killed", folder / "whole", steps=steps)
    assert [c.step for c in complete_checkpoints(folder / "killed")] == [steps - 1, steps]
    assert len(list((folder / "killed").glob("checkpoint-*"))) == 2, "what was torn does not fill the disk"
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["ended_by"] == signal.SIGINT, "a second signal ends a run at once, which does not end by itself"
    assert complete_checkpoints(folder / "interrupted") == []
    return list(said["killed_at"])


@pytest.mark.timeout(600)
def test_a_run_killed_at_random_moments_loses_nothing_and_two_signals_end_it_at_once(
    tiny_qwen3: Any, tmp_path: Path
) -> None:
    killed_at = check(tiny_qwen3, tmp_path, n_kills=3, steps=9)
    assert killed_at, "no attempt was killed before it ended"


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_fifty_kills(tiny_qwen3: Any, tmp_path: Path) -> None:
    killed_at = check(tiny_qwen3, tmp_path, n_kills=52, steps=200, timeout_s=2400)
    assert len(killed_at) >= 50


@pytest.mark.slow
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("file", ["cpu_ddp", "fsdp2", "zero2", "zero3"])
def test_two_processes_killed_again_and_again(launcher: Any, file: str, tiny_model: Path, tmp_path: Path) -> None:
    """Each time one of them, or both at once. (One kill of one of two runs by default: test_scale_backends.py.)"""
    if file.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    rng, steps, n_kills = random.Random(file), 12, 4
    config = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    job = {"model": str(tiny_model), "config": config, "pause_s": 0.05}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = launcher.run(file, [{**job, "out": str(whole)}])
    assert done.returncode == 0, done.stderr[-4000:]
    # Four steps or more are left when a run is to be killed: with pauses as long as the longest wait below it has not ended.
    job = {**job, "out": str(killed), "config": {**config, "resume_from_checkpoint": "auto"}, "pause_s": 0.5}
    for kill in range(1, n_kills + 1):
        run = launcher.start(file, [job])
        wait_for_step(killed, 2 * kill)
        time.sleep(rng.uniform(0.0, 0.5))
        for process in rng.choice([[0], [1], [0, 1]]):
            os.kill(int((killed / f"pid{process}.txt").read_text()), signal.SIGKILL)
        assert launcher.finish(run, 200).returncode != 0
    done = launcher.run(file, [job])
    assert done.returncode == 0, done.stderr[-4000:]
    for process in (0, 1):
        assert_same_run(killed, whole, steps=steps, process=process)


def wait_for_step(out: Path, step: int) -> None:
    deadline, log = time.monotonic() + 200, out / "steps0.txt"
    while not log.exists() or step > max(map(int, log.read_text().split()), default=0):
        assert time.monotonic() < deadline, f"step {step} was never done"
        time.sleep(0.05)
