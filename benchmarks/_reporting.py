"""What a benchmark does around its measurement: read `--quick`, show the table, write the JSON with where it comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import stamp_of

__all__ = ["STAMP", "progress", "result_file", "run", "save"]

STAMP = "stamp"  # the key of a result that says where it comes from
FOLDER = "BENCHMARK_RESULTS"  # where results go instead: quick ones must not replace the long ones of this folder


def result_file(name: str) -> Path:
    """Where a benchmark's results lie."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parent / "results") / f"{name}.json"


def save(name: str, results: dict[str, Any], *, quick: bool, number_type: str = "") -> None:
    """Write results, also those of a part; a reader never sees half of a file."""
    target = result_file(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    stamped = {**results, STAMP: stamp_of(quick=quick, number_type=number_type).as_json()}
    beside = target.with_suffix(".part")
    beside.write_text(json.dumps(stamped, indent=2) + "\n")
    beside.replace(target)


def progress(text: str) -> None:
    """Say where a long benchmark is."""
    print(f"... {text}", flush=True)


def run(
    name: str,
    doc: str | None,
    quick_means: str,
    measure: Callable[[bool], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    more_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    *,
    number_type: str = "",
) -> None:
    """The benchmark's command: results go to the terminal and to results/NAME.json, with where they come from."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick_means)
    more_flags(parser)
    quick = parser.parse_args().quick
    results = measure(quick)
    show(results)
    save(name, results, quick=quick, number_type=number_type)
