"""What a benchmark does around its measurement: read its flags, write the JSON with where it comes from, show the rows."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _machine import ROOT, stamp_of
from _rows import Row, table

STAMP = "stamp"  # the key of a result that says where it comes from
FOLDER = "BENCHMARK_RESULTS"  # where results go instead; `run_all.py`, which shows the rows itself, sets it
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"  # quick forms do not replace the long ones


def result_file(name: str, quick: bool) -> Path:
    """Where a benchmark's results lie."""
    return Path(os.environ.get(FOLDER) or (QUICK_RESULTS if quick else RESULTS)) / f"{name}.json"


def kept(name: str, quick: bool) -> dict[str, Any]:
    """Results of before; none: an empty dictionary."""
    path = result_file(name, quick)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(name: str, results: dict[str, Any], *, quick: bool, number_type: str = "") -> None:
    """Write results, also those of a part; a reader never sees half of a file."""
    target = result_file(name, quick)
    target.parent.mkdir(parents=True, exist_ok=True)
    stamped = {**results, STAMP: stamp_of(quick=quick, number_type=number_type).as_json()}
    beside = target.with_suffix(".part")
    beside.write_text(json.dumps(stamped, indent=2) + "\n")
    beside.replace(target)


def progress(text: str) -> None:
    """Say where a long benchmark is."""
    print(f"... {text}", flush=True)


def parser_of(doc: str | None, quick_means: str) -> argparse.ArgumentParser:
    """A benchmark's command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick_means)
    return parser


def benchmark(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    rows: Callable[[dict[str, Any]], Iterable[Row]],
    *,
    number_type: str = "",
) -> None:
    """The benchmark's command: results go to results/NAME.json, with where they come from, and their rows to the terminal."""
    options = parser.parse_args()
    results = measure(options)
    save(name, results, quick=options.quick, number_type=number_type)
    if not os.environ.get(FOLDER):
        print("\n".join(table(list(rows(results)))))
