"""Whole training steps: TRL's own trainer with its tools and colocated vLLM, and ours with `max_staleness` 0, 1 and 2.

    python benchmarks/whole_step.py                                # all parts
    python benchmarks/whole_step.py --part speed                   # one of them; the others' results stay as they are
    python benchmarks/whole_step.py --part learning --seeds 42 1   # some seeds; those measured already stay
    python benchmarks/whole_step.py --quick                        # fewer and smaller steps, one round, one seed

speed           seconds a step of 64 episodes whose tools take 0, 0.1 and 0.5 s
schema          the same with eight financial tools, whose schemas make prompts of 5,000 tokens; 16 episodes a step
real            a model of half a billion weights with LoRA and the same tools, 8 and 16 episodes a step; wants --model FOLDER
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
fewer steps.

Every run is kept as soon as it has ended: a command that was stopped goes on where it was. If nothing of what is asked is
missing, all of it is measured again. Runs of another commit are not mixed with this one's. Beside the numbers stands how
much of the machine went to other work, where that is over a tenth.

Not measured: TRL's seconds to a given success with tools of 0.5 s, an hour a seed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from _machine import stamp_of
from _reporting import benchmark, kept, parser_of, progress, save
from _rows import Row
from _whole_step_learning import LEARNING, SLOW_LEARNING, TENTH_LEARNING
from _whole_step_parts import Asked, Part, other_work
from _whole_step_real import REAL
from _whole_step_server import SERVER
from _whole_step_speed import SCHEMA, SPEED

NAME = "whole_step"
SEEDS = (42, 1, 2)
PARTS: dict[str, Part] = {
    "speed": SPEED,
    "schema": SCHEMA,
    "real": REAL,
    "server": SERVER,
    "learning": LEARNING,
    "tenth_learning": TENTH_LEARNING,
    "slow_learning": SLOW_LEARNING,
}


def measure_part(name: str, asked: Asked) -> None:
    """Measure what is missing of a part; every run is kept as soon as it has ended."""
    part, commit = PARTS[name], stamp_of(quick=asked.quick).commit
    runs = [run for run in kept(NAME, asked.quick).get(name, {}).get("runs", ()) if run["commit"] == commit]
    wanted = list(part.plan(asked))
    missing = [of for of in wanted if of not in [run["of"] for run in runs]] or wanted
    for number, of in enumerate(missing, 1):
        progress(f"{name}, {number} of {len(missing)}: {', '.join(f'{what} {value}' for what, value in of.items())}")
        began = time.monotonic()
        with other_work() as share:
            found = part.measure(of)
        about = {
            "of": of,
            "commit": commit,
            "wall_s": time.monotonic() - began,
            "other_work": share[0] if share else None,
        }
        runs = [run for run in runs if run["of"] != of] + [{**about, **found}]
        runs.sort(key=lambda run: (run["of"] not in wanted, wanted.index(run["of"]) if run["of"] in wanted else 0))
        results = {**kept(NAME, asked.quick), name: {"runs": runs, "complete": number == len(missing)}}
        save(NAME, results, quick=asked.quick, number_type="float32")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    asked = Asked(options.quick, tuple(options.seeds), options.rounds, options.model)
    for name in options.part or [name for name in PARTS if name != "real" or asked.model]:
        measure_part(name, asked)
    return kept(NAME, asked.quick)


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements; half of a part is no answer."""
    whole = {name: of["runs"] for name, of in results.items() if name in PARTS and of["complete"]}
    return [row for name, part in PARTS.items() if name in whole for row in part.rows(whole[name])]


def main() -> None:
    parser = parser_of(__doc__, "fewer and smaller steps, one round, one seed")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of learning")
    parser.add_argument("--rounds", type=int, default=2, help="of the other parts")
    parser.add_argument(
        "--model", default="", help="folder of the model of the part real, which is left out without it"
    )
    benchmark(NAME, parser, measure, rows, number_type="float32")


if __name__ == "__main__":
    main()
