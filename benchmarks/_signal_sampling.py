"""nano to 0.9 held-out success, with and without the replacement of dead groups (a part of `learning_signal.py`).

Each seed and each way is a run of the shipped recipe in a process of its own. Every few steps the held-out questions are
asked greedily; the run ends when 0.9 of them are right. Counted are the episodes that were run up to there, those of groups
that were replaced among them, and the seconds of training, without those of measuring.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 3600
WAYS = {"off": ["--dynamic_sampling", "off"], "backfill": ["--dynamic_sampling", "backfill"]}
TARGET = 0.9
EVERY = 5  # steps
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # by the number of seeds


def measure(seeds: tuple[int, ...], quick: bool) -> dict[str, Any]:
    size = ["--max_steps", "5", "--per_device_train_batch_size", "16", "--eval_questions", "24"] if quick else []
    runs = [{"seed": seed, "way": way, **_run(seed, [*flags, *size])} for seed in seeds for way, flags in WAYS.items()]
    return {"target": TARGET, "checked_every_steps": EVERY, "runs": runs, "compared": _compared(runs)}


def _run(seed: int, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--config", "recipes/configs/nano.yaml", "--seed", str(seed), *flags]
        subprocess.run([*command, "--output_dir", folder], check=True, cwd=ROOT, timeout=TIME_LIMIT_S)
        found: dict[str, Any] = json.loads((Path(folder) / "curve.json").read_text())
    return found


def _compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times fewer episodes and seconds backfill took, where both ways got there."""
    by_seed: dict[int, dict[str, Any]] = {}
    for run in runs:
        if run["reached"] is not None:
            by_seed.setdefault(run["seed"], {})[run["way"]] = run["reached"]
    both = [ways for ways in by_seed.values() if len(ways) == len(WAYS)]
    return {
        what: interval_of([math.log(ways["off"][what] / ways["backfill"][what]) for ways in both])
        for what in ("episodes", "seconds")
    }


def interval_of(logs: list[float]) -> dict[str, Any] | None:
    """The geometric mean of ratios over the seeds, with its 95 % interval (Student's t) from two seeds on."""
    if not logs:
        return None
    half = T_975[len(logs)] * stdev(logs) / math.sqrt(len(logs)) if len(logs) in T_975 else None
    interval = None if half is None else [math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)]
    return {"times_fewer": math.exp(fmean(logs)), "interval": interval, "seeds": len(logs)}


def show(results: dict[str, Any]) -> None:
    print(f"nano to {results['target']} held-out success (greedy), asked every {results['checked_every_steps']} steps")
    print(f"{'seed':>5} {'':>9} {'steps':>6} {'episodes':>9} {'seconds':>8} {'at the end':>11} {'live groups':>12}")
    for run in results["runs"]:
        at = run["reached"] or {"step": "-", "episodes": "-", "seconds": "-"}
        seconds = at["seconds"] if isinstance(at["seconds"], str) else f"{at['seconds']:.1f}"
        print(
            f"{run['seed']:>5} {run['way']:>9} {at['step']:>6} {at['episodes']:>9} {seconds:>8} "
            f"{run['curve'][-1]['success']:>11.3f} {run['live_rate']:>12.2f}"
        )
    for what, found in results["compared"].items():
        if found is None:
            print(f"{what}: no seed got there both ways")
        else:
            interval = "" if found["interval"] is None else " [{:.2f}, {:.2f}]".format(*found["interval"])
            print(f"{what}: {found['times_fewer']:.2f}{interval} times fewer with backfill ({found['seeds']} seeds)")


# --- in the process of one run ---------------------------------------------------------------------------------------


def train(argv: list[str]) -> None:
    from _heldout_runs import Plan, run

    from toolgrpo.commands.arguments import parse_arguments

    found = run(
        argv, Plan(done=lambda point: bool(point["success"] >= TARGET), due=lambda step, episodes: step % EVERY == 0)
    )
    (Path(parse_arguments(argv)[1].output_dir) / "curve.json").write_text(json.dumps(found))


if __name__ == "__main__":
    train(sys.argv[1:])
