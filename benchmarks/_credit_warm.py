"""nano that was shown chains that are longer than those it was built on, with its bad habits (a part of `credit.py`).

WARM_STEPS supervised steps of 16 demonstrations each, with the embedded job's own tools, in which every call is left out with
probability SKIPS: the number is guessed if it is the first, and what is there by then is taken for the answer if it is a
later one. So the model knows how each call is made, and seldom makes all: of 96 held-out chains of four it does 4 % when its
tokens are drawn, and 19 % greedily. Both numbers were chosen so before any way of credit was tried on it.
"""

from __future__ import annotations

import fcntl
import json
import random
import subprocess
import sys
from pathlib import Path

__all__ = ["WARM_STEPS", "warmed"]

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS = 300
SKIPS = 0.4
BATCH = 16
TIME_LIMIT_S = 600


def warmed(n_calls: int) -> Path:
    """Return the model's folder; it is made once, whoever asks for it first."""
    folder = ROOT / "outputs" / "credit" / f"warmed-{n_calls}-{WARM_STEPS}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").exists():
            data = folder.with_suffix(".jsonl")
            data.write_text("".join(json.dumps(row) + "\n" for row in _demonstrations(n_calls, WARM_STEPS * BATCH)))
            command = [sys.executable, "-m", "toolgrpo", "sft", "--model_name_or_path", "nano"]
            command += ["--dataset_id_or_path", str(data), "--output_dir", str(folder), "--batch_size", str(BATCH)]
            command += ["--max_steps", str(WARM_STEPS), "--learning_rate", "1e-3", "--lr_scheduler_type", "linear"]
            command += ["--save_strategy", "no", "--report_to", "none", "--seed", "0"]
            subprocess.run(command, check=True, cwd=ROOT, timeout=TIME_LIMIT_S)
    return folder


def _demonstrations(n_calls: int, n: int) -> list[dict[str, object]]:
    from recipes.nano.demonstrations import Habits, demonstrate, draw_training_problem
    from recipes.nano.toolsets import CANONICAL
    from toolgrpo.data.arithmetic import OPERATIONS

    rng = random.Random(f"chains of {n_calls}")
    schemas = [tool.schema for tool in CANONICAL]
    skips = dict.fromkeys(OPERATIONS, SKIPS)
    habits = Habits(guess=skips, stop_early=skips)
    conversations = (demonstrate(draw_training_problem(rng, n_calls), CANONICAL, rng, habits) for _ in range(n))
    return [{"messages": messages, "tools": schemas} for messages in conversations]
