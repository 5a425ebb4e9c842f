"""Whole training steps: TRL's own trainer with its tools and colocated vLLM, and ours with `max_staleness` 0, 1 and 2.

    python benchmarks/whole_step.py                                # all parts
    python benchmarks/whole_step.py --part speed                   # one of them; the others' results stay as they are
    python benchmarks/whole_step.py --part learning --seeds 42 1   # some seeds; those measured already stay
    python benchmarks/whole_step.py --quick                        # fewer and smaller steps, one round, one seed

speed           seconds a step of 64 episodes whose tools take 0, 0.1 and 0.5 s
schema          the same with eight financial tools, whose schemas make prompts of 5,000 tokens; 16 episodes a step
server          the engine in a process of its own on one core, the trainer on the other
learning        nano to 0.9 held-out success, and how good it is after 40 steps, by seed; TRL's trainer too
tenth_learning  the same where every tool call takes 0.1 s; TRL's trainer on the first seed, which takes 10 minutes
slow_learning   ours where every tool call takes 0.5 s

In the first three every run trains nano with the same job: episodes of up to 5 turns of 32 sampled tokens, whose calls and
latencies are scripted (`_whole_step_runs.py`). It is checked that all trainers call tools, by their own count, and have the
same calls and the same number of sampled tokens in each step. Each variant is a process of its own; rounds are interleaved.
A step is everything between two optimizer steps: rollouts, weights to the engine, rewards, loss, update. TRL's trainer is
given the weight sync it needs on a CPU, and the threads that vLLM takes from the training pass. Steps in which the latency
has just changed, or nothing more is begun ahead, are left out. TRL calls tools one after the other, so its slow phases have
fewer steps. `could` is what overlap could give at this engine's and this pass's own speed, if each had a machine.

Every run is kept as soon as it has ended: a command that was stopped goes on where it was. If nothing of what is asked is
missing, all of it is measured again. Runs of another commit are not mixed with this one's. Beside the numbers stands how
much of the machine went to other work, where that is over a tenth.

Not measured: TRL's seconds to a given success with tools of 0.5 s, an hour a seed.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from _machine import stamp_of
from _other_work import OtherWork
from _reporting import progress, result_file, save
from _rows import Row
from _whole_step_learning import LEARNING, SLOW_LEARNING, TENTH_LEARNING
from _whole_step_parts import Asked, Part
from _whole_step_server import SERVER
from _whole_step_speed import SCHEMA, SPEED

NAME = "whole_step"
SEEDS = (42, 1, 2)
PARTS: dict[str, Part] = {
    "speed": SPEED,
    "schema": SCHEMA,
    "server": SERVER,
    "learning": LEARNING,
    "tenth_learning": TENTH_LEARNING,
    "slow_learning": SLOW_LEARNING,
}


def kept() -> dict[str, Any]:
    path = result_file(NAME)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {name: result for name, result in found.items() if name.removesuffix(QUICK) in PARTS}


QUICK = " (quick)"  # after the name of a part: a quick form replaces no long one


def measure(name: str, asked: Asked) -> dict[str, Any]:
    """Measure what is missing of a part; every run is kept as soon as it has ended."""
    part, key = PARTS[name], name + (QUICK if asked.quick else "")
    commit = stamp_of(quick=asked.quick).commit
    runs = [run for run in kept().get(key, {}).get("runs", ()) if run["commit"] == commit]
    wanted = list(part.plan(asked))
    missing = [of for of in wanted if of not in [run["of"] for run in runs]] or wanted
    for number, of in enumerate(missing, 1):
        progress(f"{name}, {number} of {len(missing)}: {', '.join(f'{what} {value}' for what, value in of.items())}")
        began = time.monotonic()
        with OtherWork() as other:
            found = part.measure(of)
        about = {"of": of, "commit": commit, "wall_s": time.monotonic() - began, "other_work": other.share}
        runs = [run for run in runs if run["of"] != of] + [{**about, **found}]
        runs.sort(key=lambda run: (run["of"] not in wanted, wanted.index(run["of"]) if run["of"] in wanted else 0))
        results = {**kept(), key: {"runs": runs, "summary": None}}
        save(NAME, results, quick=asked.quick, number_type="float32")
    result = {"runs": runs, "summary": part.summary(runs)}
    save(NAME, {**kept(), key: result}, quick=asked.quick, number_type="float32")
    return result


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements; what was only measured quickly, or not to its end, says so or is left out."""
    made = []
    for name, part in PARTS.items():
        whole = [results[key] for key in (name, name + QUICK) if key in results and results[key]["summary"] is not None]
        made += part.rows(whole[0]) if whole else []
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps, one round, one seed")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of learning")
    parser.add_argument("--rounds", type=int, default=2, help="of the other parts")
    options = parser.parse_args()
    asked = Asked(options.quick, tuple(options.seeds), options.rounds)
    for name in options.part or PARTS:
        PARTS[name].show(measure(name, asked))


if __name__ == "__main__":
    main()
