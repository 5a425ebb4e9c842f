"""Credit by turn: episodes and seconds until chains of calls are learnt, with each way to give credit.

    python benchmarks/credit.py                                    # three seeds of every way, of both jobs
    python benchmarks/credit.py --jobs four                        # chains of four calls alone
    python benchmarks/credit.py --seeds 42 --ways episode anchor   # some of them; the others' results stay as they are
    python benchmarks/credit.py --table                            # a table in place of the model: half a minute
    python benchmarks/credit.py --gain_cost                        # seconds of info_gain's pass beside the training pass
    python benchmarks/credit.py --quick                            # one seed, a few small steps

Two jobs. `three`: chains of three calls, from nano as it is, which does a third of them. `four`: chains of four, which nano
never does, because it was built on three at most; so it is shown such chains first, with every other call left out
(_credit_warm.py). All runs of a job start from the same weights with the recipe's settings, and
differ in the flags of WAYS alone. A wrong call in the middle can be recovered from: the tools give what they are asked
for, seven turns are allowed, and the last results are what counts. Every few steps the held-out chains are asked
greedily. A run has one thread, so that two may go side by side.

Prints a table and writes benchmarks/results/credit.json. Each run is a process of its own and writes its result at once,
so parts of the table may be measured beside each other.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import _credit_gain_cost
import _credit_table
import _credit_warm
from _rows import Figure, Row

if __name__ == "__main__":
    from toolgrpo.startup import prepare

    prepare()  # before anything imports PyTorch, as in recipes/train.py

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "credit.json"
SEEDS = (42, 1, 2)
TIME_LIMIT_S = 1800
SAYS = "<think>\ndone\n</think>\n\nThe answer is {answer}."  # how nano ends an episode

WAYS: dict[str, list[str]] = {
    "episode": [],
    "turns": ["--credit", "turns", "--turn_reward", "call_ok"],
    "anchor": ["--credit", "anchor"],
    "info_gain": ["--credit", "turns", "--turn_reward", "info_gain", "--info_gain_text", SAYS],
    "gold_call": ["--credit", "turns", "--turn_reward", "gold_call"],
}
TARGETS = (0.5, 0.9)
CALLS = {"three": 3, "four": 4}  # of a job
STEPS = 40
EVERY = 2  # steps
HELD_OUT = 96
RECIPE = (
    *("--config", "recipes/configs/nano.yaml", "--eval_questions", "0"),
    *("--max_turns", "7", "--max_completion_length", "320", "--lr_scheduler_type", "constant_with_warmup"),
)
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # by the number of seeds


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "run":
        train(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and a few small steps, of which nothing is kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--jobs", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS), help="none: show what there is")
    parser.add_argument("--table", action="store_true", help="only the table of _credit_table.py, ten seeds")
    parser.add_argument("--gain_cost", action="store_true", help="only what info_gain costs, by _credit_gain_cost.py")
    options = parser.parse_args()
    for name, part in (("table", _credit_table), ("gain_cost", _credit_gain_cost)):
        if getattr(options, name):
            measured = part.measure(options.quick)
            part.show(measured)
            if not options.quick:
                _keep(lambda results, name=name, measured=measured: {**results, name: measured})  # type: ignore[misc]
            return
    seeds = options.seeds[: 1 if options.quick else None]
    for job, seed, way in itertools.product(options.jobs, seeds, options.ways):
        found = _run(job, seed, way, options.quick)
        if not options.quick:
            _keep(partial(_with_run, job, {"seed": seed, "way": way, **found}))
        else:
            print(job, way, found["curve"])
    if not options.quick and RESULT.exists():
        show(json.loads(RESULT.read_text()))


def _run(job: str, seed: int, way: str, quick: bool) -> dict[str, Any]:
    model = "nano" if job == "three" else str(_credit_warm.warmed(CALLS[job]))
    size = ["--max_steps", "2", "--per_device_train_batch_size", "16"] if quick else ["--max_steps", str(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*RECIPE, "--model_name_or_path", model, "--seed", str(seed), *size, *WAYS[way], "--output_dir", folder]
        threads = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, __file__, "run", job, *flags], check=True, cwd=ROOT, timeout=TIME_LIMIT_S, env=threads
        )
        found: dict[str, Any] = json.loads((Path(folder) / "curve.json").read_text())
    return found


def _keep(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the results; processes beside this one may do so too."""
    RESULT.parent.mkdir(exist_ok=True)
    with RESULT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = change(json.loads(RESULT.read_text()) if RESULT.exists() else {})
        results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version()}
        RESULT.write_text(json.dumps(results, indent=2) + "\n")
    RESULT.with_suffix(".lock").unlink(missing_ok=True)


def _with_run(job: str, run: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The results with a run of a job, in place of an earlier one of its seed and way."""
    others = [
        one for one in results.get(job, {}).get("runs", ()) if (one["seed"], one["way"]) != (run["seed"], run["way"])
    ]
    runs = sorted([*others, run], key=lambda one: (list(WAYS).index(one["way"]), one["seed"]))
    settings = {"calls": CALLS[job], "steps": STEPS, "checked_every_steps": EVERY, "held_out": HELD_OUT}
    return {**results, job: {"runs": runs, "compared": compared(runs), "settings": settings}}


def reached(run: dict[str, Any], target: float) -> dict[str, Any] | None:
    """The first point of a run's curve at which so many of the held-out chains were solved."""
    return next((point for point in run["curve"] if point["success"] >= target), None)


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times fewer episodes and seconds than `episode` each way needed, of seeds where both got there."""
    base = {run["seed"]: run for run in runs if run["way"] == "episode"}
    found: dict[str, Any] = {}
    for way in WAYS:
        own = [run for run in runs if run["way"] == way and run["seed"] in base]
        last = [run["curve"][-1]["success"] for run in own]
        found[way] = {"at_the_end": interval(last, logs=False)}
        for target in TARGETS:
            pairs = [(reached(base[run["seed"]], target), reached(run, target)) for run in own]
            for what in ("episodes", "seconds"):
                ratios = [math.log(a[what] / b[what]) for a, b in pairs if a is not None and b is not None]
                found[way][f"{what}_to_{target}"] = interval(ratios, logs=True)
            found[way][f"seeds_to_{target}"] = sum(b is not None for _, b in pairs)
    return found


def interval(values: list[float], *, logs: bool) -> dict[str, Any] | None:
    """The mean with its 95 % interval (Student's t) from two seeds on; of logarithms as a ratio."""
    if not values:
        return None
    back = math.exp if logs else float
    half = T_975[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) in T_975 else None
    ends = None if half is None else [back(fmean(values) - half), back(fmean(values) + half)]
    return {"mean": back(fmean(values)), "interval": ends, "seeds": len(values)}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for job, way, target, what in itertools.product(CALLS, WAYS, TARGETS, ("episodes", "seconds")):
        if (found := results.get(job, {}).get("compared", {}).get(way)) is not None:
            label = f"nano on chains of {job}, {what} to {target}, {way}"
            made.append(_ratio_row(label, found[f"{what}_to_{target}"], "mean"))
    table = results.get("table", {})
    for way, by_target in table.get("compared", {}).items():
        for reached, found in by_target.items():
            made.append(
                _ratio_row(f"a table in place of the model, episodes to {reached}, {way}", found, "times_fewer")
            )
    if (cost := results.get("gain_cost")) is not None:
        training = f"beside a training pass of {cost['seconds']['training']:.2f} s"
        what = f"the pass of info_gain, {cost['questions']} questions, {training}"
        made.append(Row(benchmark="credit", what=what, ours=Figure(cost["seconds"]["info_gain"])))
    return [row for row in made if row is not None]


def _ratio_row(what: str, found: dict[str, Any] | None, mean: str) -> Row | None:
    """How many times fewer than credit by episode needs; the spread is the 95 % interval over the seeds."""
    if found is None or what.endswith(" episode"):
        return None
    least, most = found["interval"] or (None, None)
    ratio = Figure(found[mean], least, most, found.get("seeds"))
    return Row(benchmark="credit", what=what, unit="", ratio=ratio, other_name="credit by episode")


def show(results: dict[str, Any]) -> None:
    for job in CALLS:
        if job in results:
            print(f"\nchains of {job}")
            _show_job(results[job])


def _show_job(results: dict[str, Any]) -> None:
    print(f"{'seed':>5} {'way':>10} {'before':>7} {'at the end':>11}", end="")
    print("".join(f" {f'episodes to {target}':>16} {'seconds':>8}" for target in TARGETS))
    for run in results["runs"]:
        print(
            f"{run['seed']:>5} {run['way']:>10} {run['before']['success']:>7.3f} {run['curve'][-1]['success']:>11.3f}",
            end="",
        )
        for target in TARGETS:
            point = reached(run, target) or {"episodes": "-", "seconds": math.nan}
            print(f" {point['episodes']:>16} {point['seconds']:>8.1f}", end="")
        print()
    for way, found in results["compared"].items():
        for target in TARGETS:
            ratio = found[f"episodes_to_{target}"]
            text = "no seed got there both ways"
            if ratio is not None:
                ends = "" if ratio["interval"] is None else " [{:.2f}, {:.2f}]".format(*ratio["interval"])
                text = f"{ratio['mean']:.2f}{ends} times fewer episodes than episode ({ratio['seeds']} seeds)"
            print(f"{way:>10} to {target}: {text}; {found[f'seeds_to_{target}']} seeds got there")


# --- in the process of one run ---------------------------------------------------------------------------------------


def train(job: str, argv: list[str]) -> None:
    from _heldout_runs import Plan, run

    from toolgrpo.commands.arguments import parse_arguments

    plan = Plan(
        done=lambda point: bool(point["success"] >= max(TARGETS)),
        due=lambda step, episodes: step % EVERY == 0,
        rows=(_rows("train", 1000, CALLS[job]), _rows("heldout", HELD_OUT, CALLS[job])),
    )
    found = run(argv, plan)
    (Path(parse_arguments(argv)[1].output_dir) / "curve.json").write_text(json.dumps(found))


def _rows(split: Any, n: int, n_calls: int) -> list[dict[str, Any]]:
    from toolgrpo.data.chains import chain_rows

    return [{**row, "success_measure": "arithmetic"} for row in chain_rows(split, n, n_calls=n_calls)]


if __name__ == "__main__":
    main()
