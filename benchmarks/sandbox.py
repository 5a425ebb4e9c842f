"""The sandbox: what a run costs, how many a second, how long the start takes; a plain subprocess stands beside it.

    python benchmarks/sandbox.py            # tables on the terminal, JSON in
                                            # benchmarks/results/sandbox.json
    python benchmarks/sandbox.py --quick    # fewer repetitions

`run` is one run after the other without a pause; `rested` leaves 20 ms between
runs, as a trainer's own work does; `numpy` imports numpy and sympy; `grade` is a
correct program against three asserts, from its text to its score: a process for the
program, one for the judge, three calls between them; `call` is what one more call
of a test adds, `grades/s` what two threads get, `open` a session with its first run.
The rung `unsafe` and the plain subprocess
confine nothing. Bubblewrap and sandlock, as a prefix of a new interpreter, are
measured where `bwrap` and `sandlock` are installed.
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

from _reporting import progress, run, save
from _rows import Figure, Row
from rich.console import Console
from rich.table import Table

from toolgrpo.sandbox import Rung, Sandbox
from toolgrpo.sandbox.grading import grade
from toolgrpo.sandbox.grading.split_plan import Suite
from toolgrpo.sandbox.rungs.ladder import probe

CODE = "print(1 + 1)"
COMMANDS = {  # other sandboxes, as a prefix of a new interpreter
    "bwrap": ("--ro-bind", "/", "/", "--unshare-all", "--die-with-parent"),
    "sandlock": ("run", "-r", "/", "--"),
}
IMPORTS = "import numpy, sympy\nprint(numpy.arange(3).sum())"


def spread(taken: list[float]) -> dict[str, float]:
    """The median, and the time that 95 of 100 stay within."""
    at_95 = sorted(taken)[math.ceil(0.95 * len(taken)) - 1]
    return {"p50": statistics.median(taken), "p95": at_95, "least": min(taken), "most": max(taken), "n": len(taken)}


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


def grades(sandbox: Sandbox) -> bool:
    """A correct program against three asserts."""
    suite = Suite(("assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"))
    return grade(sandbox, "def f(x):\n    return x + 1", suite).all_passed


def graded_call_ms(sandbox: Sandbox, repetitions: int) -> dict[str, float]:
    """What one call adds to a grading, from tests with 100 of them."""
    suite = Suite(("for i in range(100):\n    assert f(i) == i + 1",))
    alone = Suite(("assert f(0) == 1",))

    def once(suite: Suite) -> None:
        assert grade(sandbox, "def f(x):\n    return x + 1", suite).all_passed

    base = times_ms(lambda: once(alone), repetitions)["p50"]
    many = times_ms(lambda: once(suite), repetitions)
    return {name: max(0.0, taken - base) / 99 for name, taken in many.items()}


def per_s(call: Callable[[], bool], clients: int, repetitions: int) -> float:
    """How often a second `call` is done by as many threads as there are clients."""

    def work() -> None:
        for _ in range(repetitions):
            assert call()

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
        found["runs_per_s"] = per_s(lambda: sandbox.run(CODE).stdout == "2\n", 2, repetitions)

        def new_session() -> None:
            with sandbox.session() as session:
                session.run(CODE)

        found["new_session_ms"] = times_ms(new_session, repetitions // 10)
        assert grades(sandbox)  # opens the judges' workers
        found["grading_ms"] = times_ms(lambda: grades(sandbox), repetitions // 5)
        found["graded_call_ms"] = graded_call_ms(sandbox, max(5, repetitions // 50))
        found["grades_per_s"] = per_s(lambda: grades(sandbox), 2, max(5, repetitions // 10))
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

    def keep(name: str, way: dict[str, Any]) -> None:
        ways[name] = way
        save("sandbox", {"ways": ways}, quick=quick)

    for rung in (Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP):
        progress(f"rung {rung.value}")
        reason = probe(rung)
        keep(f"rung {rung.value}", measure_rung(rung, repetitions) if reason is None else {"absent": reason})
    keep("rung unsafe", measure_rung(Rung.UNSAFE, repetitions // 10))
    keep("subprocess", measure_command([], repetitions // 10))
    for name, options in COMMANDS.items():
        program = shutil.which(name)
        if program is None:
            keep(name, {"absent": f"{name} is not installed"})
            continue
        try:
            keep(name, measure_command([program, *options], repetitions // 10))
        except subprocess.CalledProcessError as error:
            keep(name, {"absent": error.stderr.decode(errors="replace").strip()[-200:]})
    return {"ways": ways}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    ways = {name: way for name, way in results["ways"].items() if "absent" not in way}
    others = {name: way for name, way in ways.items() if not name.startswith("rung ")}
    for name, way in ways.items():
        if name in others:
            continue
        for measure, what in (("run_ms", "a run"), ("numpy_ms", "a run that imports numpy and sympy")):
            for other, its in others.items():
                label = "a plain subprocess, which confines nothing" if other == "subprocess" else f"a new {other}"
                made.append(
                    Row(
                        benchmark="sandbox",
                        what=f"{what}, {name}",
                        unit="ms",
                        ours=_figure(way[measure]),
                        other=_figure(its[measure]),
                        other_name=label,
                    )
                )
        for measure, what, target in (("grading_ms", "a grading", "under 20 ms"), ("new_session_ms", "a session", "")):
            ours = _figure(way[measure])
            made.append(Row(benchmark="sandbox", what=f"{what}, {name}", unit="ms", ours=ours, target=target))
        rate = Figure(way["runs_per_s"], n=1)
        made.append(Row(benchmark="sandbox", what=f"runs, {name}", unit="a second", ours=rate, more_is_better=True))
    return made


def _figure(times: dict[str, Any]) -> Figure:
    return Figure(times["p50"], times.get("least"), times.get("most"), times.get("n"))


def show(results: dict[str, Any]) -> None:
    """Two tables that fit into 80 columns, and a line for each way that this machine does not have."""
    console = Console()
    present = {name: way for name, way in results["ways"].items() if "absent" not in way}
    runs = Table("way", "run", "rested", "numpy", "grade", title="Times in ms, p50 / p95; goals: run 5 / 10, grade 20")
    for name, way in present.items():
        measures = ("run_ms", "rested_ms", "numpy_ms", "grading_ms")
        runs.add_row(name, *(_both(way[measure]) if measure in way else "" for measure in measures))
    console.print(runs)
    columns = ("runs/s", "grades/s", "call", "open", "session run", "start")
    ours = Table("way", *columns, title="Rates; times in ms; the start in s. Goals: 250 runs/s, start 2 s")
    for name, way in present.items():
        if "start_s" in way:
            rates = (f"{way[measure]:.0f}" for measure in ("runs_per_s", "grades_per_s"))
            parts = (f"{way[part]['p50']:.2f}" for part in ("graded_call_ms", "new_session_ms", "session_run_ms"))
            ours.add_row(name, *rates, *parts, f"{way['start_s']:.2f}")
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
