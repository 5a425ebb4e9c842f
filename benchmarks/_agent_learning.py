"""Whether an agent learns what our own loop learns: nano's arithmetic, three seeds each (a part of `gateway.py`).

The two ways have the same rewards, questions, steps and settings, those of recipes/configs/nano.yaml but for fewer steps; only
what plays the episodes differs, our own loop or recipes/agents/arithmetic.py behind the gateway. Each training is handed on when
it ends, so that an interruption costs one, and what was handed on before is not measured again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _reporting import progress
from _rows import Figure, Row

__all__ = ["compared", "measure", "rows"]

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
STEPS = 30
WAYS = {"own loop": "nano.yaml", "agent": "agent.yaml"}
RATES = ("greedy", "sampled")
REWARDS = ("--reward", "accuracy", "exact_match", "--reward_weights", "0.5", "0.5")
T_975 = {2: 12.706, 3: 4.303}  # by the number of seeds
TIME_LIMIT_S = 4 * 3600.0

Run = dict[str, Any]


def measure(kept: Iterable[Run], hand_on: Callable[[list[Run]], None]) -> list[Run]:
    """Train what is not among the kept runs; hand on all that there is after each."""
    runs = list(kept)
    for seed in SEEDS:
        for way in WAYS:
            if any((run["seed"], run["way"]) == (seed, way) for run in runs):
                progress(f"{way}, seed {seed}: measured before")
                continue
            runs.append({"seed": seed, "way": way, **_trained(way, seed)})
            progress(f"{way}, seed {seed}: {runs[-1]['after']}")
            hand_on(runs)
    return runs


def _trained(way: str, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        what = ["--config", f"recipes/configs/{WAYS[way]}", "--output_dir", folder, "--quiet"]
        size = ["--seed", str(seed), "--max_steps", str(STEPS)]
        command = [sys.executable, "-m", "toolgrpo", "train", *what, *size, *REWARDS]
        subprocess.run(command, cwd=ROOT, check=True, timeout=TIME_LIMIT_S)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {name: summary[name] for name in ("before", "after", "steps", "seconds_per_step")}


def compared(runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """Return how much more often the agent is right after the training: the mean of the seeds, and its interval at 95 %."""
    rates = {(run["seed"], run["way"]): run["after"] for run in runs}
    both = [seed for seed in SEEDS if all((seed, way) in rates for way in WAYS)]
    found = {}
    for name in RATES if len(both) > 1 else ():
        more = [rates[seed, "agent"][name]["rate"] - rates[seed, "own loop"][name]["rate"] for seed in both]
        half = T_975[len(both)] * statistics.stdev(more) / len(both) ** 0.5
        mean = statistics.fmean(more)
        found[name] = {"mean": mean, "interval": [mean - half, mean + half], "seeds": both}
    return found


def rows(runs: Iterable[Run]) -> list[Row]:
    """For the page of all measurements."""
    rates = {(run["seed"], run["way"]): run["after"]["sampled"]["rate"] for run in runs}
    made = []
    for seed in sorted({seed for seed, _ in rates}):
        agent, own = (rates.get((seed, way)) for way in ("agent", "own loop"))
        if agent is None or own is None:
            continue  # its run has not ended yet
        made.append(
            Row(
                benchmark="gateway",
                what=f"nano's arithmetic by an agent, seed {seed}: sampled success after training",
                unit="",
                ours=Figure(agent),
                other=Figure(own),
                other_name="our own loop",
                more_is_better=True,
            )
        )
    return made
