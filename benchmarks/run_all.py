"""All benchmarks, one after the other; docs/reference/measured.md has the claims that they show.

    python benchmarks/run_all.py                     # everything: many hours on two cores
    python benchmarks/run_all.py --only rollouts tools
    python benchmarks/run_all.py --fast              # quick forms of the quickest, in under five minutes
    python benchmarks/run_all.py --list              # what there is, and how long it takes

`make bench`, `make bench FAST=1`. To add a benchmark: a script here with a function `rows(results)`, which saves its results
by `_reporting` as they come, and an entry in TABLE. Each has a time limit. One that reaches it keeps its rows and says that
the others were not reached: a slow machine is no error. One that fails keeps its rows too; the others still run, and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from _machine import this_machine
from _reporting import FOLDER, QUICK_RESULTS, RESULTS
from _rows import Row, table

HERE = Path(__file__).resolve().parent
FAST_S = 290.0  # for all quick forms together
NOT_REACHED = "not reached"  # in the status of a benchmark whose time was over
HEARTBEAT_S = 30.0


Form = Literal["whole", "fast"]


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows of one benchmark, and how its run ended."""

    benchmark: str
    status: str  # `done`, or what came between
    rows: tuple[Row, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A script, how it is called at length and quickly, and about how long that takes on two cores."""

    about: str
    minutes: float
    whole: tuple[tuple[str, ...], ...] = ((),)  # the arguments of each call
    fast: tuple[str, ...] | None = None  # none: it has no form that takes seconds
    fast_s: float = 0.0


TABLE = {
    "training_pass": Benchmark(
        about="The training pass, beside TRL's", minutes=20, whole=((), ("--real",)), fast=("--quick",), fast_s=70
    ),
    "rollouts": Benchmark(
        about="Rollouts, beside TRL's tool loop", minutes=20, fast=("--quick", "--models", "nano"), fast_s=80
    ),
    "whole_step": Benchmark(about="Whole training steps, beside TRL's trainer", minutes=80),
    "chat": Benchmark(about="Reading a turn and going on", minutes=4, fast=("--quick",), fast_s=20),
    "tools": Benchmark(about="Tool calls", minutes=1, fast=("--quick",), fast_s=8),
    "sandbox": Benchmark(about="The sandbox, beside a plain subprocess", minutes=4, fast=("--quick",), fast_s=15),
    "server_client": Benchmark(about="What a vLLM server costs its client", minutes=1, fast=("--quick",), fast_s=10),
    "report": Benchmark(about="The recording and the report", minutes=8),
    "learning": Benchmark(about="The embedded job, on three seeds", minutes=15),
    "roads": Benchmark(about="The road that check names, beside the others", minutes=240),
    "real_model": Benchmark(about="SmolLM2-135M, from worked examples to GRPO, on three seeds", minutes=150),
    "segments": Benchmark(about="Episodes of several segments", minutes=90),
    "gateway": Benchmark(about="The gateway, beside our own loop", minutes=40),
    "dead_rows": Benchmark(about="The training pass without its dead rows", minutes=8),
    "credit": Benchmark(about="Turn-level credit", minutes=2),
    "code_tasks": Benchmark(about="Answers of code tasks, graded", minutes=1),
}


def limit_s(benchmark: Benchmark, form: Form) -> float:
    """A slow machine takes three times as long."""
    return 3 * benchmark.fast_s if form == "fast" else max(600.0, 180 * benchmark.minutes)


def measured(name: str, form: Form, limit: float) -> Entry:
    """Run a benchmark and read what it has written, however it ended."""
    benchmark = TABLE[name]
    calls = [benchmark.fast or ()] if form == "fast" else benchmark.whole
    folder = QUICK_RESULTS if form == "fast" else RESULTS
    started, began, status = time.monotonic(), time.time(), "done"
    for arguments in calls:
        left = limit - (time.monotonic() - started)
        ended = run_script(name, arguments, folder, left)
        if ended != "done":
            status = ended
            break
    seconds = time.monotonic() - started
    path = folder / f"{name}.json"
    if not path.exists() or path.stat().st_mtime < began - 1:
        return Entry(name, status if status != "done" else "ended well, and wrote no results", seconds=seconds)
    status = f"{status}; the rows that it had measured until then" if status.startswith("failed") else status
    return Entry(name, status, rows_of(name, json.loads(path.read_text())), seconds)


def rows_of(benchmark: str, results: dict[str, Any]) -> tuple[Row, ...]:
    """Return the rows of a result, made by the script that wrote it."""
    made: Iterable[Row] = importlib.import_module(benchmark).rows(results)
    return tuple(made)


def run_script(name: str, arguments: Sequence[str], folder: Path, limit: float) -> str:
    """Run a script, say every half minute that it runs, and end it with all that it started at its limit."""
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, FOLDER: str(folder)}, start_new_session=True)
    try:
        while (spent := time.monotonic() - started) < limit:
            try:
                status = process.wait(min(HEARTBEAT_S, limit - spent))
            except subprocess.TimeoutExpired:
                print(f"... {name}: {time.monotonic() - started:.0f} s", flush=True)
                continue
            return "done" if status == 0 else f"failed with status {status}"
        return f"{NOT_REACHED} in {limit:.0f} s: rows that are not here"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_well(entry: Entry) -> bool:
    """Return whether a benchmark did what it could; a slow machine is no error."""
    return entry.status == "done" or entry.status.startswith(NOT_REACHED)


def run(names: Sequence[str], form: Form) -> bool:
    """Run benchmarks, show the rows of each, and return whether none failed."""
    machine = this_machine()
    print(f"{machine.name}: {machine.line}\n", flush=True)
    started, well = time.monotonic(), True
    for place, name in enumerate(names, 1):
        limit = limit_s(TABLE[name], form)
        if form == "fast":
            for_later = sum(TABLE[later].fast_s for later in names[place:])
            limit = min(limit, FAST_S - (time.monotonic() - started) - for_later)
        about = f"{TABLE[name].fast_s:.0f} s" if form == "fast" else f"{TABLE[name].minutes:g} min"
        print(f"\n== {place} of {len(names)}: {name} (about {about}, at most {max(limit, 0) / 60:.1f} min)", flush=True)
        over = Entry(name, f"{NOT_REACHED}: the time of all was over")
        entry = over if limit < 1 else measured(name, form, limit)
        well = well and is_well(entry)
        print(f"== {name}: {entry.status}, {entry.seconds:.0f} s", flush=True)
        print("\n".join(table(entry.rows)), flush=True)
    print(f"\n{len(names)} benchmarks in {(time.monotonic() - started) / 60:.1f} min", flush=True)
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="quick forms of the quickest, in under five minutes")
    parser.add_argument("--only", nargs="+", choices=TABLE, metavar="NAME", help="some of the benchmarks")
    parser.add_argument("--list", action="store_true", help="show what there is")
    options = parser.parse_args()
    if options.list:
        for name, one in TABLE.items():
            fast = "" if one.fast is None else f", quick form {one.fast_s:.0f} s"
            print(f"{name:18}{one.minutes:>5g} min{fast:22} {one.about}")
        return 0
    form: Form = "fast" if options.fast else "whole"
    chosen = options.only or list(TABLE)
    names = [name for name in chosen if form == "whole" or TABLE[name].fast is not None]
    well = run(names, form)
    if left_out := [name for name in chosen if name not in names]:
        print(f"no quick form, so not measured: {', '.join(left_out)}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
