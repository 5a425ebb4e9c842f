"""Whole training steps: TRL's own trainer with its tools and colocated vLLM, and ours with `max_staleness` 0, 1 and 2.

    python benchmarks/whole_step.py            # table on the terminal, JSON in benchmarks/results/whole_step.json
    python benchmarks/whole_step.py --quick    # 32 episodes a step instead of 64, one round instead of three

Every run trains nano with the same job: episodes of up to 5 turns of 32 sampled tokens, whose calls and tool latencies are
scripted (`_whole_step_runs.py`), the same number of episodes a step. Each variant is a process of its own; the rounds are
interleaved. A step is everything between two optimizer steps: rollouts, weights to the engine, rewards, loss, update. TRL's
trainer is given the weight sync it needs on a CPU, and the threads that vLLM takes from the training pass. Steps in which the
latency has just changed, or nothing more is begun ahead, are left out. TRL calls tools one after the other, so its slow
phases have fewer steps.

`simulated` is what overlap could give at this engine's and this pass's own speed, if each had the machine for itself.

Not measured: seconds to a given success, which needs runs of many minutes on several seeds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _reporting import run
from _rollout_loops import MAX_TURNS, decision
from _rows import Figure, Row
from _whole_step_runs import GROUP, Phase

LATENCIES = (0.0, 0.1, 0.5)
STALENESS = (0, 1, 2)
TURN_S = 0.05  # of decoding, as the simulation has it


def phases(kind: str, quick: bool) -> list[Phase]:
    if kind == "TRL":
        return [Phase(0.0, 1, 3), Phase(0.1, 0, 2), Phase(0.5, 0, 1)]
    measured = 4 if quick else 6
    last = max(STALENESS)  # nothing is begun ahead in the last steps
    return [*(Phase(latency, 1 + int(kind), measured) for latency in LATENCIES), Phase(LATENCIES[-1] + 1e-9, last, 0)]


def measure_one(kind: str, n: int, quick: bool) -> dict[str, Any]:
    plan = [(one.latency_s, one.warm, one.measured) for one in phases(kind, quick)]
    with tempfile.NamedTemporaryFile() as answer:
        script = str(Path(__file__).with_name("_whole_step_runs.py"))
        command = [sys.executable, script, kind, str(n), json.dumps(plan), answer.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(Path(answer.name).read_text())
    assert found["episodes"] == n * found["steps"], "each step has its episodes, and no more"
    return found


def simulated(latency_s: float, n: int, engine_s: float, train_s: float, staleness: int, steps: int = 60) -> float:
    """Seconds a step: batch b begins when the pass of batch b - 1 - staleness has ended."""
    ends: list[float] = []
    busy = 0.0
    for batch in range(steps):
        start = ends[batch - 1 - staleness] if batch > staleness else 0.0
        busy = max(busy, start) + engine_s
        slowest = max(path_s(batch * n + place, latency_s) for place in range(n))
        ends.append(max(start + slowest, busy, ends[-1] if ends else 0.0) + train_s)
    return ends[-1] / steps


def path_s(uid: int, latency_s: float) -> float:
    factors = (decision(uid, turn) for turn in range(MAX_TURNS))
    seconds = 0.0
    for factor in factors:
        seconds += TURN_S
        if factor is None:
            break
        seconds += factor * latency_s
    return seconds


def measure(quick: bool) -> dict[str, Any]:
    n, rounds = (32, 1) if quick else (64, 3)
    kinds = ["TRL", *map(str, STALENESS)]
    seconds: dict[str, dict[float, list[float]]] = {kind: {latency: [] for latency in LATENCIES} for kind in kinds}
    rollout_s: list[float] = []
    for _ in range(rounds):
        for kind in kinds:
            found = measure_one(kind, n, quick)
            for latency in LATENCIES:
                seconds[kind][latency] += found["seconds"].get(str(latency), [])
            if kind == "0":
                rollout_s += found["rollout_s"]["0.0"]
    engine_s = statistics.median(rollout_s)
    train_s = statistics.median(seconds["0"][0.0]) - engine_s
    table = []
    for latency in LATENCIES:
        median = {kind: statistics.median(seconds[kind][latency]) for kind in kinds}
        ideal = {k: simulated(latency, n, engine_s, train_s, k) for k in STALENESS}
        table.append(
            {
                "latency_s": latency,
                "seconds": median,
                "all_seconds": {kind: seconds[kind][latency] for kind in kinds},
                "faster_than_trl": {kind: median["TRL"] / median[kind] for kind in kinds},
                "faster_than_0": {kind: median["0"] / median[kind] for kind in kinds},
                "simulated_faster_than_0": {str(k): ideal[0] / ideal[k] for k in STALENESS},
            }
        )
    return {
        "episodes_a_step": n,
        "group_size": GROUP,
        "rounds": rounds,
        "engine_s": engine_s,
        "train_s": train_s,
        "steps": table,
    }


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements; the bound of overlap is that of the simulation, as a time."""
    made = []
    for row in results["steps"]:
        trl = Figure.of(row["all_seconds"]["TRL"])
        for staleness in map(str, STALENESS):
            ideal = row["simulated_faster_than_0"][staleness]
            made.append(
                Row(
                    benchmark="whole_step",
                    what=f"a step of {results['episodes_a_step']} episodes, a tool call takes {row['latency_s']} s, "
                    f"max_staleness {staleness}",
                    ours=Figure.of(row["all_seconds"][staleness]),
                    other=trl,
                    other_name="TRL's trainer",
                    bound=None if staleness == "0" else row["seconds"]["0"] / ideal,
                )
            )
    return made


def show(results: dict[str, Any]) -> None:
    print(f"\nseconds a step of {results['episodes_a_step']} episodes (median), nano, tools of some seconds")
    print(
        f"{'tool':>5} {'TRL':>8} "
        + " ".join(f"{f'ours, {k}':>8}" for k in STALENESS)
        + "   0/TRL   1/0   2/0  simulated"
    )
    for row in results["steps"]:
        of, ideal = row["seconds"], row["simulated_faster_than_0"]
        print(
            f"{row['latency_s']:>5.1f} {of['TRL']:>8.2f} "
            + " ".join(f"{of[str(k)]:>8.2f}" for k in STALENESS)
            + f" {row['faster_than_trl']['0']:>6.1f}x {row['faster_than_0']['1']:>4.2f}x {row['faster_than_0']['2']:>4.2f}x"
            + f"  {ideal['1']:.2f}x {ideal['2']:.2f}x"
        )
    print(f"engine {results['engine_s']:.2f} s and training {results['train_s']:.2f} s a step, at staleness 0")


if __name__ == "__main__":
    run("whole_step", __doc__, "32 episodes a step, one round", measure, show)
