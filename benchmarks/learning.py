"""Learning: nano trained with the recipe of `make train` on three seeds.

    python benchmarks/learning.py            # table, benchmarks/results/learning.json and learning.png
    python benchmarks/learning.py --quick    # one seed

Every training runs in a process of its own, as a user starts it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _reporting import progress, result_file, save
from _rows import Figure, Row

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 1200


def train(seed: int, folder: Path) -> dict[str, Any]:
    """One run of the shipped recipe; its summary, its wall-clock time and its curve."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", "recipes/accelerate/cpu.yaml", "recipes/train.py"),
        *("--config", "recipes/configs/nano.yaml", "--seed", str(seed), "--output_dir", str(folder)),
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, timeout=TIME_LIMIT_S)
    seconds = time.monotonic() - started
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = [{"step": entry["step"], "success": entry["success"]} for entry in history if "success" in entry]
    return {"seed": seed, "wall_s": seconds, "curve": curve, **summary}


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for run in runs:
        steps = [point["step"] for point in run["curve"]]
        axes.plot(steps, [point["success"] for point in run["curve"]], label=f"seed {run['seed']}", linewidth=1.2)
    axes.axhline(0.88, color="grey", linestyle=":", linewidth=1)
    axes.set(
        xlabel="step", ylabel="success in training (temperature 1)", ylim=(0, 1), title="nano learns to use its tools"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    runs = results["runs"]
    for way in ("greedy", "sampled"):
        after, before = ([run[when][way]["rate"] for run in runs] for when in ("after", "before"))
        told = ", ".join(f"{rate:.3f}" for rate in before)
        what = f"held-out success, {way}, of seeds {', '.join(str(run['seed']) for run in runs)} (untrained: {told})"
        made.append(Row(benchmark="learning", what=what, unit="", ours=Figure.of(after), more_is_better=True))
    for what, of in (
        ("a training, imports and both measurements included", [run["wall_s"] for run in runs]),
        ("a step", [run["seconds_per_step"]["all"] for run in runs]),
    ):
        made.append(Row(benchmark="learning", what=what, ours=Figure.of(of)))
    return made


def show(runs: list[dict[str, Any]]) -> None:
    print(
        f"{'seed':>5} {'greedy before':>14} {'after':>6} {'sampled before':>15} {'after':>6} {'wall s':>7} {'s/step':>7}"
    )
    for run in runs:
        print(
            f"{run['seed']:>5} {run['before']['greedy']['rate']:>14.3f} {run['after']['greedy']['rate']:>6.3f} "
            f"{run['before']['sampled']['rate']:>15.3f} {run['after']['sampled']['rate']:>6.3f} "
            f"{run['wall_s']:>7.0f} {run['seconds_per_step']['all']:>7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    options = parser.parse_args()
    seeds = options.seeds[:1] if options.quick else options.seeds
    with tempfile.TemporaryDirectory() as folder:
        runs: list[dict[str, Any]] = []
        for seed in seeds:
            progress(f"training, seed {seed} ({len(runs) + 1} of {len(seeds)})")
            runs.append(train(seed, Path(folder) / f"seed{seed}"))
            save("learning", {"runs": runs}, quick=options.quick, number_type="float32")
    show(runs)
    plot(runs, result_file("learning").with_suffix(".png"))


if __name__ == "__main__":
    main()
