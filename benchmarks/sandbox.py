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
confine nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from _reporting import benchmark, parser_of, progress, save
from _rows import Figure, Row

from confined_python.client.host_process import probe
from confined_python.grading import Suite, grade
from toolgrpo.sandbox import Rung, Sandbox

CODE = "print(1 + 1)"
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


def measure_subprocess(repetitions: int) -> dict[str, Any]:
    def run(code: str) -> None:
        subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, env={})

    return {
        "run_ms": times_ms(lambda: run(CODE), repetitions),
        "numpy_ms": times_ms(lambda: run(IMPORTS), max(3, repetitions // 10)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    repetitions = 100 if options.quick else 1000
    ways: dict[str, Any] = {}

    def keep(name: str, way: dict[str, Any]) -> None:
        ways[name] = way
        save("sandbox", {"ways": ways}, quick=options.quick)

    for rung in (Rung.NAMESPACES, Rung.LANDLOCK, Rung.SECCOMP):
        progress(f"rung {rung.value}")
        reason = probe(rung)
        keep(f"rung {rung.value}", measure_rung(rung, repetitions) if reason is None else {"absent": reason})
    keep("rung unsafe", measure_rung(Rung.UNSAFE, repetitions // 10))
    keep("subprocess", measure_subprocess(repetitions // 10))
    return {"ways": ways}


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements; a rung that this machine does not have is in the JSON with its reason."""
    made = []
    ways = {name: way for name, way in results["ways"].items() if "absent" not in way}
    plain, label = ways["subprocess"], "a plain subprocess, which confines nothing"
    for name, way in ways.items():
        if not name.startswith("rung "):
            continue
        for part, what in (("run_ms", "a run"), ("numpy_ms", "a run that imports numpy and sympy")):
            made.append(Row(f"{what}, {name}", _figure(way[part]), "ms", _figure(plain[part]), label))
        for part, what, target in (
            ("rested_ms", "a run after a rest", "under 5 ms"),
            ("grading_ms", "a grading", "under 20 ms"),
            ("new_session_ms", "a session", ""),
        ):
            made.append(Row(f"{what}, {name}", _figure(way[part]), "ms", target=target))
        made.append(Row(f"runs, {name}", Figure(way["runs_per_s"], n=1), "a second", target="250"))
    return made


def _figure(times: dict[str, Any]) -> Figure:
    return Figure(times["p50"], times.get("least"), times.get("most"), times.get("n"))


if __name__ == "__main__":
    benchmark("sandbox", parser_of(__doc__, "fewer repetitions"), measure, rows)
