"""Learning: nano trained with the recipe of `make train` on three seeds.

    python benchmarks/learning.py            # benchmarks/results/learning.json
    python benchmarks/learning.py --quick    # one seed
    python benchmarks/learning.py --hybrid   # a nano of Qwen3.5's shape instead, which is built first: some minutes more

Every training runs in a process of its own, as a user starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import ROOT
from _reporting import benchmark, kept, parser_of, progress, save
from _rows import Figure, Row

NAME = "learning"
TIME_LIMIT_S = 3600


def train(seed: int, folder: Path, model: str) -> dict[str, Any]:
    """One run of the shipped recipe; its summary, its wall-clock time and its curve."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", "recipes/accelerate/cpu.yaml", "recipes/train.py"),
        *("--config", "recipes/configs/nano.yaml", "--seed", str(seed), "--output_dir", str(folder)),
        *("--model_name_or_path", model),
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, timeout=TIME_LIMIT_S)
    seconds = time.monotonic() - started
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    curve = [{"step": entry["step"], "success": entry["success"]} for entry in history if "success" in entry]
    return {"seed": seed, "wall_s": seconds, "curve": curve, **summary}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The runs of nano, or those of the hybrid beside the ones of nano that were kept."""
    runs: list[dict[str, Any]] = []
    others = {"runs": [], **kept(NAME, options.quick)} if options.hybrid else {}
    seeds = options.seeds[:1] if options.quick else options.seeds
    with tempfile.TemporaryDirectory() as base:
        model = "nano"
        if options.hybrid:
            model = str(Path(base, "hybrid"))
            progress("building the hybrid")
            build = [sys.executable, "-m", "recipes.nano.build", "--hybrid", "--out", model]
            subprocess.run(build, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for seed in seeds:
            progress(f"training, seed {seed} ({len(runs) + 1} of {len(seeds)})")
            runs.append(train(seed, Path(base, str(seed)), model))
            found = {**others, "hybrid" if options.hybrid else "runs": runs}
            save(NAME, found, quick=options.quick, number_type="float32")
    return found


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    return [*_rows("nano", results["runs"]), *_rows("nano of Qwen3.5's shape", results.get("hybrid", []))]


def _rows(name: str, runs: list[dict[str, Any]]) -> list[Row]:
    if not runs:
        return []
    made = []
    seeds = ", ".join(str(run["seed"]) for run in runs)
    for way in ("greedy", "sampled"):
        after, before = (Figure.of([run[when][way]["rate"] for run in runs]) for when in ("after", "before"))
        what = f"{name}, held-out success, {way}, seeds {seeds}"
        made.append(Row(what, after, "", before, "untrained", more_is_better=True))
    made.append(Row("a training, imports and both measurements included", Figure.of([run["wall_s"] for run in runs])))
    return [*made, Row("a step", Figure.of([run["seconds_per_step"]["all"] for run in runs]))]


def main() -> None:
    parser = parser_of(__doc__, "one seed")
    parser.add_argument("--hybrid", action="store_true", help="a nano of Qwen3.5's shape")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    benchmark(NAME, parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
