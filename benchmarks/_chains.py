"""A harder embedded task: chains of calls (a part of `learning_signal.py`).

Half of its questions need a chain of three calls, of which untrained nano solves about a fifth, half one of four, of which it
solves less than 1 %, and the reward is 1 for the right number and else 0: there
is none for calls on the way, so most groups are dead at first. Each seed and each arm is a run of the shipped recipe in a
process of its own, with the same number of episodes, those of replaced groups among them. The held-out questions are asked
greedily as the run goes on, and it is said for each length when half of them were right; a run ends early once the longer
ones are. The learning rate is constant after its warm-up, for the arms take unlike numbers of steps. A run has one thread, so that two may go side by side.

Each run's result is kept as it is measured, in `outputs/learning_signal/chains`, and a run that is there is not made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "outputs" / "learning_signal" / "chains"
TIME_LIMIT_S = 3600
TARGET = 0.5
BUDGET = 1920  # episodes
ASKED = 8  # times in a run
PER_STEP = 64
LENGTHS = (3, 4)  # calls
QUESTIONS = 48  # held out, of each length

ARMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "backfill": ("--dynamic_sampling", "backfill"),
}
RECIPE = (
    *("--config", "recipes/configs/nano.yaml", "--eval_questions", "0"),
    *("--max_turns", str(max(LENGTHS) + 2), "--max_completion_length", "320"),
    *("--reward", "exact_match", "--reward_weights", "1.0"),
    *("--lr_scheduler_type", "constant_with_warmup"),
)


def measure(seeds: tuple[int, ...], quick: bool) -> dict[str, Any]:
    runs = [run_of(seed, arm, quick) for seed in seeds for arm in ARMS]
    return summary(runs)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "target": TARGET,
        "budget": BUDGET,
        "calls": LENGTHS,
        "questions": QUESTIONS * len(LENGTHS),
        "runs": runs,
        "untrained": _untrained(runs),
        "reached_by": {
            arm: {str(n): sum(run["reached"][str(n)] is not None for run in runs if run["arm"] == arm) for n in LENGTHS}
            for arm in dict.fromkeys(run["arm"] for run in runs)
        },
    }


def run_of(seed: int, arm: str, quick: bool) -> dict[str, Any]:
    """Return what a run gave, which may have been made before."""
    folder = KEPT / f"{arm.replace(' ', '_')}_{seed}{'_quick' if quick else ''}"
    result = folder / "curve.json"
    if not result.exists():
        size = ["--max_steps", "2", "--per_device_train_batch_size", "16"] if quick else []
        size = size or ["--max_steps", str(BUDGET // PER_STEP), "--per_device_train_batch_size", str(PER_STEP)]
        command = [sys.executable, __file__, *RECIPE, "--seed", str(seed), *ARMS[arm], *size]
        threads = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--output_dir", str(folder)], check=True, cwd=ROOT, timeout=TIME_LIMIT_S, env=threads)
    found: dict[str, Any] = json.loads(result.read_text())
    reached = {
        str(n): next((point for point in found["curve"] if point["by_calls"][str(n)] >= TARGET), None) for n in LENGTHS
    }
    return {"seed": seed, "arm": arm, **found, "reached": reached}


def _untrained(runs: list[dict[str, Any]]) -> dict[str, float]:
    """How much of the task nano solves before training: greedy, and sampled once with each seed."""
    by_seed = {run["seed"]: run["before_sampled"]["success"] for run in runs}
    return {"greedy": runs[0]["before"]["success"], "sampled": sum(by_seed.values()) / len(by_seed)}


def show(results: dict[str, Any]) -> None:
    untrained = results["untrained"]
    print(
        f"chains of {' and '.join(map(str, results['calls']))} calls to {results['target']} held-out success (greedy), "
        f"{results['budget']} episodes; untrained {untrained['sampled']:.3f} sampled, {untrained['greedy']:.3f} greedy"
    )
    print(
        f"{'seed':>5} {'':>9} {'calls':>6} {'episodes':>9} {'seconds':>8} {'steps':>6} {'best':>6} {'live groups':>12}"
    )
    for run in results["runs"]:
        for n, at in run["reached"].items():
            reached = at or {"episodes": "-", "seconds": float("nan"), "step": "-"}
            best = max(point["by_calls"][n] for point in run["curve"])
            print(
                f"{run['seed']:>5} {run['arm']:>9} {n:>6} {reached['episodes']:>9} {reached['seconds']:>8.1f} "
                f"{reached['step']:>6} {best:>6.3f} {run['live_rate']:>12.2f}"
            )


# --- in the process of one run ---------------------------------------------------------------------------------------


def train(argv: list[str]) -> None:
    from _heldout_runs import Plan, run

    from toolgrpo.commands.arguments import parse_arguments

    folder = Path(parse_arguments(argv)[1].output_dir)
    asked = [0]

    def due(step: int, episodes: int) -> bool:
        share = episodes * ASKED // BUDGET
        is_due, asked[0] = share > asked[0], share
        return is_due

    def done(point: dict[str, Any]) -> bool:
        return bool(point["by_calls"][max(LENGTHS)] >= TARGET)

    found = run(argv, Plan(done, due, BUDGET, (_rows("train", 1000), _rows("heldout", QUESTIONS))))
    written = folder / "curve.json.tmp"
    written.write_text(json.dumps(found))
    written.replace(folder / "curve.json")


def _rows(split: Any, n: int) -> list[dict[str, Any]]:
    """`n` questions of each length."""
    from toolgrpo.data.chains import chain_rows

    return [
        {**row, "success_measure": "arithmetic"} for n_calls in LENGTHS for row in chain_rows(split, n, n_calls=n_calls)
    ]


if __name__ == "__main__":
    train(sys.argv[1:])
