"""What was measured of each benchmark, where: kept in results/MACHINE.json, a file for each machine.

An entry has the rows of one benchmark with the stamp they come from. Quick forms have a place of their own, so that they
never replace what was measured at length. What only lies in a benchmark's own JSON (measured by hand, or elsewhere and put
into the repository) is taken in from there; without a stamp it stands under the machine `unknown`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from _machine import Stamp
from _reporting import STAMP
from _rows import Row

__all__ = ["UNKNOWN", "Entries", "Entry", "Form", "entries_in", "from_results", "rows_of", "write_machine"]

UNKNOWN = "unknown"
Form = Literal["whole", "fast"]
Entries = dict[str, dict[str, "Entry"]]  # by machine and `benchmark form`


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows of one benchmark, how its run ended, and where it ran."""

    benchmark: str
    form: Form
    status: str  # `done`, or what came between
    rows: tuple[Row, ...]
    stamp: Stamp | None = None
    seconds: float | None = None

    @property
    def machine(self) -> str:
        return UNKNOWN if self.stamp is None else self.stamp.machine.name

    @property
    def key(self) -> str:
        return f"{self.benchmark} {self.form}"

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "form": self.form,
            "status": self.status,
            "seconds": self.seconds,
            "stamp": None if self.stamp is None else self.stamp.as_json(),
            "rows": [row.as_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Entry:
        stamp = None if found["stamp"] is None else Stamp.from_json(found["stamp"])
        rows = tuple(Row.from_json(row) for row in found["rows"])
        return cls(found["benchmark"], found["form"], found["status"], rows, stamp, found["seconds"])


def rows_of(benchmark: str, results: dict[str, Any]) -> tuple[Row, ...]:
    """The rows of a result, made by the script that wrote it."""
    made: Iterable[Row] = importlib.import_module(benchmark).rows(results)
    return tuple(made)


def from_results(benchmark: str, path: Path, form: Form) -> Entry | None:
    """What a benchmark's own JSON says; None if there is none."""
    if not path.exists():
        return None
    results = json.loads(path.read_text())
    stamp = None if STAMP not in results else Stamp.from_json(results[STAMP])
    return Entry(benchmark, form, "done", rows_of(benchmark, results), stamp)


def entries_in(folder: Path, benchmarks: Iterable[str]) -> Entries:
    """Everything that the results of a folder say, each run once."""
    names = tuple(benchmarks)
    found: Entries = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem not in names and "entries" in (kept := json.loads(path.read_text())):
            read = [Entry.from_json(entry) for entry in kept["entries"]]
            found[path.stem] = {entry.key: entry for entry in read}
    for name in names:
        entry = from_results(name, folder / f"{name}.json", "whole")
        if entry is None or any(entry.rows == one.rows for of in found.values() for one in of.values()):
            continue
        place = found.setdefault(entry.machine, {})
        if entry.key not in place or _date(entry) > _date(place[entry.key]):
            place[entry.key] = entry
    return found


def _date(entry: Entry) -> str:
    return "" if entry.stamp is None else entry.stamp.date


def write_machine(folder: Path, machine: str, entries: Iterable[Entry]) -> Path:
    """Put entries into the file of their machine, in place of earlier ones of the same benchmark and form."""
    target = folder / f"{machine}.json"
    kept = json.loads(target.read_text())["entries"] if target.exists() else []
    merged = {entry.key: entry for entry in [*map(Entry.from_json, kept), *entries]}
    ordered = [merged[key].as_json() for key in sorted(merged)]
    folder.mkdir(parents=True, exist_ok=True)
    beside = target.with_suffix(".part")
    beside.write_text(json.dumps({"machine": machine, "entries": ordered}, indent=1) + "\n")
    beside.replace(target)
    return target
