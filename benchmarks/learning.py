"""Learning: nano trained with the recipe of `make train` on three seeds.

    python benchmarks/learning.py            # benchmarks/results/learning.json
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

from _machine import ROOT
from _reporting import benchmark, parser_of, progress, save
from _rows import Figure, Row

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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    seeds = options.seeds[:1] if options.quick else options.seeds
    for seed in seeds:
        progress(f"training, seed {seed} ({len(runs) + 1} of {len(seeds)})")
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(seed, Path(folder)))
        save("learning", {"runs": runs}, quick=options.quick, number_type="float32")
    return {"runs": runs}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made, runs = [], results["runs"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    for way in ("greedy", "sampled"):
        after, before = (Figure.of([run[when][way]["rate"] for run in runs]) for when in ("after", "before"))
        what = f"nano, held-out success, {way}, seeds {seeds}"
        made.append(Row(what, after, "", before, "untrained", more_is_better=True))
    made.append(Row("a training, imports and both measurements included", Figure.of([run["wall_s"] for run in runs])))
    return [*made, Row("a step", Figure.of([run["seconds_per_step"]["all"] for run in runs]))]


def main() -> None:
    parser = parser_of(__doc__, "one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    benchmark("learning", parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
