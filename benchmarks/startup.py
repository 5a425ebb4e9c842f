"""How long a person waits from the shell prompt to the end of the first training step on nano.

    python benchmarks/startup.py [--quick] [--runs N]

Starts the command of `make train` in a process of its own (nano is built before, if it never was), with one step, and
notes when each line appears: everything counts, `accelerate launch` and the imports too, and the measuring of success
before training, which the recipe asks for. Prints one table, the median of the runs, and writes
benchmarks/results/startup.json. `--quick`: one run, with the transformers engine only.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _reporting import progress, save
from _rows import Figure, Row
from rich.console import Console
from rich.table import Table

TARGET_S = 40.0
ROOT = Path(__file__).parents[1]
STAGES = {
    "first words": "toolgrpo: loading",
    "imports done, tools loaded": "tools ",
    "data and rewards checked": "reward ",
    "model and engine started": "engine ",
    "success before training": "before ",
    "first step done": "step 1/1",
}


def measure(engine: str) -> dict[str, float]:
    """Seconds from the start of the process to each stage."""
    progress(f"a start with {engine}")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu.yaml"),
            *("recipes/train.py", "--config", "recipes/configs/nano.yaml", "--output_dir", folder),
            *("--max_steps", "1", "--engine", engine),
        ]
        started, seen = time.monotonic(), dict[str, float]()
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            shown = []
            for line in process.stdout:
                shown.append(line)
                for stage, beginning in STAGES.items():
                    if line.startswith(beginning):
                        seen.setdefault(stage, time.monotonic() - started)
        if process.returncode or set(seen) != set(STAGES):
            raise SystemExit(
                f"the command failed or said something else (exit {process.returncode}):\n{''.join(shown)}"
            )
        return seen


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    return [
        Row(
            benchmark="startup",
            what=f"from the command to: {stage} ({engine})",
            ours=Figure.of([run[stage] for run in runs]),
            target=f"under {results['target_s']:g} s" if stage == list(STAGES)[-1] else "",
        )
        for engine, runs in results["runs"].items()
        for stage in STAGES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run, transformers engine only")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    engines = ["transformers"] if arguments.quick else ["vllm_colocate", "transformers"]
    runs = 1 if arguments.quick else arguments.runs
    subprocess.run([sys.executable, "-m", "toolgrpo.nano"], cwd=ROOT, check=True)
    found = {engine: [measure(engine) for _ in range(runs)] for engine in engines}
    medians = {
        engine: {stage: statistics.median(run[stage] for run in of) for stage in STAGES} for engine, of in found.items()
    }
    table = Table("seconds after the command was entered", *engines, title=f"start-up (target: {TARGET_S:g} s)")
    for stage in STAGES:
        table.add_row(stage, *(f"{medians[engine][stage]:.1f}" for engine in engines))
    Console().print(table)
    results = {"target_s": TARGET_S, "median": medians, "runs": found}
    save("startup", results, quick=arguments.quick, number_type="float32")


if __name__ == "__main__":
    main()
