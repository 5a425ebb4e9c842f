"""The sandbox: what a run costs, how many a second, how long the start takes; a plain subprocess stands beside it.

    python benchmarks/sandbox.py            # tables on the terminal, JSON in
                                            # benchmarks/results/sandbox.json
    python benchmarks/sandbox.py --quick    # fewer repetitions

`run` is one run after the other without a pause; `rested` leaves 20 ms between
runs, as a trainer's own work does; `numpy` imports numpy and sympy; `grade` is a
correct program against three asserts. The rung `unsafe` and the plain subprocess
confine nothing. Bubblewrap (as a rung, and as a prefix of a new interpreter) and
sandlock are measured where `bwrap` and `sandlock` are installed.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from _reporting import run
from rich.console import Console
from rich.table import Table

from toolgrpo.sandbox import Rung, Sandbox
from toolgrpo.sandbox.grading import grade
from toolgrpo.sandbox.grading.split_plan import Suite
from toolgrpo.sandbox.rungs.bubblewrap import find_bubblewrap
from toolgrpo.sandbox.rungs.ladder import probe

CODE = "print(1 + 1)"
COMMANDS = {  # other sandboxes, as a prefix of a new interpreter
    "bwrap": ("--ro-bind", "/", "/", "--unshare-all", "--die-with-parent"),
    "sandlock": ("run", "-r", "/", "--"),
}
IMPORTS = "import numpy, sympy\nprint(numpy.arange(3).sum())"


def spread(taken: list[float]) -> dict[str, float]:
    """The median, and the time that 95 of 100 stay within."""
    return {"p50": statistics.median(taken), "p95": sorted(taken)[math.ceil(0.95 * len(taken)) - 1]}


def times_ms(call: Callable[[], object], repetitions: int) -> dict[str, float]:
    taken = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - started))
    return spread(taken)


def rested_ms(sandbox: Sandbox, repetitions: int) -> dict[str, float]:
    """A run after 20 ms of rest, the rest not counted."""
    taken = []
    for _ in range(repetitions):
        time.sleep(0.02)
        taken.append(times_ms(lambda: sandbox.run(CODE), 1)["p50"])
    return spread(taken)


def grading_ms(sandbox: Sandbox, repetitions: int) -> dict[str, float]:
    """A correct program against three asserts."""
    suite = Suite(("assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"))

    def once() -> None:
        assert grade(sandbox, "def f(x):\n    return x + 1", suite).all_passed

    return times_ms(once, repetitions)


def runs_per_s(sandbox: Sandbox, clients: int, repetitions: int) -> float:
    def work() -> None:
        for _ in range(repetitions):
            assert sandbox.run(CODE).stdout == "2\n"

    threads = [threading.Thread(target=work) for _ in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * repetitions / (time.perf_counter() - started)


def measure_rung(rung: Rung, repetitions: int) -> dict[str, Any]:
    started = time.perf_counter()
    with Sandbox(rung=rung, workers=2, allow_unsafe=rung is Rung.UNSAFE) as sandbox:
        sandbox.run(CODE)
        found: dict[str, Any] = {"start_s": time.perf_counter() - started}
        found["run_ms"] = times_ms(lambda: sandbox.run(CODE), repetitions)
        found["rested_ms"] = rested_ms(sandbox, repetitions // 5)
        found["numpy_ms"] = times_ms(lambda: sandbox.run(IMPORTS), repetitions // 4)
        found["runs_per_s"] = runs_per_s(sandbox, 2, repetitions)

        def new_session() -> None:
            with sandbox.session() as session:
                session.run(CODE)

        found["new_session_ms"] = times_ms(new_session, repetitions // 10)
        found["grading_ms"] = grading_ms(sandbox, repetitions // 10)
        with sandbox.session() as session:
            found["session_run_ms"] = times_ms(lambda: session.run(CODE), repetitions)
    return found


def measure_command(prefix: list[str], repetitions: int) -> dict[str, Any]:
    def run(code: str) -> None:
        subprocess.run([*prefix, sys.executable, "-I", "-c", code], check=True, capture_output=True, env={})

    return {
        "run_ms": times_ms(lambda: run(CODE), repetitions),
        "numpy_ms": times_ms(lambda: run(IMPORTS), max(3, repetitions // 10)),
    }


def measure(quick: bool) -> dict[str, Any]:
    repetitions = 100 if quick else 1000
    ways: dict[str, Any] = {}
    for rung in (Rung.NAMESPACES, Rung.LANDLOCK, Rung.BUBBLEWRAP, Rung.SECCOMP):
        reason = probe(rung)
        ways[f"rung {rung.value}"] = measure_rung(rung, repetitions) if reason is None else {"absent": reason}
    ways["rung unsafe"] = measure_rung(Rung.UNSAFE, repetitions // 10)
    ways["subprocess"] = measure_command([], repetitions // 10)
    for name, options in COMMANDS.items():
        program = find_bubblewrap() if name == "bwrap" else shutil.which(name)
        if program is None:
            ways[name] = {"absent": f"{name} is not installed"}
            continue
        try:
            ways[name] = measure_command([program, *options], repetitions // 10)
        except subprocess.CalledProcessError as error:
            ways[name] = {"absent": error.stderr.decode(errors="replace").strip()[-200:]}
    return {"ways": ways}


def show(results: dict[str, Any]) -> None:
    """Two tables that fit into 80 columns, and a line for each way that this machine does not have."""
    console = Console()
    present = {name: way for name, way in results["ways"].items() if "absent" not in way}
    runs = Table("way", "run", "rested", "numpy", "grade", title="Times in ms, p50 / p95; goals for run: 5 / 10")
    for name, way in present.items():
        measures = ("run_ms", "rested_ms", "numpy_ms", "grading_ms")
        runs.add_row(name, *(_both(way[measure]) if measure in way else "" for measure in measures))
    console.print(runs)
    ours = Table("way", "runs/s", "open session ms", "session run ms", "start s", title="Goals: 250 runs/s, start 2 s")
    for name, way in present.items():
        if "start_s" in way:
            sessions = (f"{way[measure]['p50']:.2f}" for measure in ("new_session_ms", "session_run_ms"))
            ours.add_row(name, f"{way['runs_per_s']:.0f}", *sessions, f"{way['start_s']:.2f}")
    console.print(ours)
    for name, way in results["ways"].items():
        if "absent" in way:
            console.print(f"{name} is not here: {way['absent']}", markup=False)


def _both(times: dict[str, float]) -> str:
    """Three digits of each, so that a row stays narrow."""
    return " / ".join(
        f"{t:.2f}" if t < 10 else f"{t:.1f}" if t < 100 else f"{t:.0f}" for t in (times["p50"], times["p95"])
    )


if __name__ == "__main__":
    run("sandbox", __doc__, "fewer repetitions", measure, show)
