"""How long `load_tasks` takes for a large JSONL file, and how much memory it adds.

    python benchmarks/data.py [--quick] [--rows N]

Prints one table and writes benchmarks/results/data.json. The file has messages, an answer, a list and an object of
changing keys in each row, about 600 bytes. Memory is the growth of the process's peak while loading.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from _reporting import save
from _rows import Figure, Row
from rich.console import Console
from rich.table import Table

from toolgrpo.data import load_tasks

TARGET_S = 10.0


def write(path: Path, n: int) -> None:
    with path.open("w") as file:
        for i in range(n):
            row = {
                "prompt": [{"role": "user", "content": f"Question {i}: {'x' * 400}"}],
                "answer": i,
                "level": i % 3,
                "tags": ["a", "b"],
                "meta": {"number": i, **({"odd": True} if i % 2 else {})},
            }
            file.write(json.dumps(row) + "\n")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(n: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, n)
        before, started = peak_mib(), time.perf_counter()
        rows = load_tasks(path)
        seconds = time.perf_counter() - started
        assert len(rows) == n and rows[n - 1]["answer"] == str(n - 1)
        return {
            "rows": n,
            "file_mib": path.stat().st_size / 2**20,
            "seconds": seconds,
            "added_peak_mib": peak_mib() - before,
        }


def rows(results: dict[str, Any]) -> list[Row]:
    """For the page of all measurements."""
    made = []
    for one in results["results"]:
        target = f"under {results['target_s']:g} s" if one["rows"] == 100_000 else ""
        what = f"load_tasks of {one['rows']:,} rows"
        made.append(Row(benchmark="data", what=what, ours=Figure(one["seconds"], n=1), target=target))
        memory = Figure(one["added_peak_mib"], n=1)
        made.append(Row(benchmark="data", what=f"{what}: added memory", unit="MiB", ours=memory))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10,000 rows at most")
    parser.add_argument("--rows", type=int, default=100_000)
    arguments = parser.parse_args()
    largest = min(arguments.rows, 10_000) if arguments.quick else arguments.rows
    measure(1000)  # imports and first use
    results = []
    for n in (max(1, largest // 10), largest):
        results.append(measure(n))
        save("data", {"target_s": TARGET_S, "results": results}, quick=arguments.quick)
    table = Table(
        "rows", "file MiB", "seconds", "added peak MiB", title=f"load_tasks (target: 100,000 rows in {TARGET_S:g} s)"
    )
    for result in results:
        table.add_row(
            f"{result['rows']:,}",
            f"{result['file_mib']:.1f}",
            f"{result['seconds']:.2f}",
            f"{result['added_peak_mib']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
