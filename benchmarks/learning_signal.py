"""What steps teach, and what they cost: one part for each question. Not `signal.py`: Python has a module of that name.

    python benchmarks/learning_signal.py                        # all parts
    python benchmarks/learning_signal.py --part skipped_rows    # one of them; the others' results stay as they are
    python benchmarks/learning_signal.py --quick                # a few small steps of each, one seed

skipped_rows   the training pass of the last third of the nano run, whole and without its dead rows, on the same batches
backfill       nano to 0.9 held-out success with and without the replacement of dead groups, in episodes and in seconds
chains         a harder task: is 0.5 reached, plain and with backfill, on equal episodes

Prints a table a part and writes benchmarks/results/learning_signal.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _chains
import _signal_sampling
import _skipped_rows
from _rows import Figure, Row
from _signal_plot import plot

RESULT = Path(__file__).parent / "results" / "learning_signal.json"
SEEDS = (42, 1, 2)


class Part(NamedTuple):
    """One question: how it is measured, of which seeds, quickly or not, and how the answer is shown."""

    measure: Callable[[tuple[int, ...], bool], dict[str, Any]]
    show: Callable[[dict[str, Any]], None]


PARTS = {
    "skipped_rows": Part(_skipped_rows.measure, _skipped_rows.show),
    "backfill": Part(_signal_sampling.measure, _signal_sampling.show),
    "chains": Part(_chains.measure, _chains.show),
}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements; a part that was only measured quickly says so."""
    made = []
    said = {
        name: " (quick form)" if part["machine"]["quick"] else "" for name, part in results.items() if name in PARTS
    }
    for run in results.get("skipped_rows", {}).get("runs", ()):
        whole, live = (Figure.of([sum(step[way].values()) for step in run["steps"]]) for way in ("whole", "live"))
        made.append(
            Row(
                benchmark="learning_signal",
                what=f"training pass of the last third of the nano run, seed {run['seed']}{said['skipped_rows']}",
                ours=live,
                other=whole,
                other_name="with dead rows",
                ratio=Figure(run["faster"]),
            )
        )
    for what, found in results.get("backfill", {}).get("compared", {}).items():
        if found is not None:
            least, most = found["interval"] or (None, None)
            ratio = Figure(found["times_fewer"], least, most, found["seeds"])
            label = f"{what} to {results['backfill']['target']} held-out success, with backfill{said['backfill']}"
            made.append(
                Row(benchmark="learning_signal", what=label, unit="", ratio=ratio, other_name="without backfill")
            )
    chains = results.get("chains", {})
    for arm, by_calls in chains.get("reached_by", {}).items():
        runs = sum(run["arm"] == arm for run in chains["runs"])
        for calls, reached in by_calls.items():
            label = f"seeds that reach {chains['target']} on chains of {calls} calls, {arm}{said['chains']}"
            made.append(
                Row(
                    benchmark="learning_signal",
                    what=label,
                    unit=f"of {runs}",
                    ours=Figure(reached),
                    more_is_better=True,
                )
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small steps of each part, one seed")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    seeds = tuple(options.seeds)[: 1 if options.quick else None]
    RESULT.parent.mkdir(exist_ok=True)
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in options.part or PARTS:
        part = PARTS[name]
        measured = part.measure(seeds, options.quick)
        part.show(measured)
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "quick": options.quick}
        results[name] = {**measured, "seeds": list(seeds), "machine": machine}
        RESULT.write_text(json.dumps(results, indent=2) + "\n")
    plot(results, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
