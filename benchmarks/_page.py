"""The page of all measurements, docs/measured.md: made from the entries alone, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _entries import UNKNOWN, Entries, Entry
from _rows import Figure, Row

__all__ = ["page", "table"]

HEAD = """\
# Measured

<!-- made by `python benchmarks/run_all.py --page`; not to be edited -->

Every benchmark of `benchmarks/`, ours beside what it is compared with, also where ours is slower.
`make bench` measures all of them on this machine and makes this page anew, `make bench FAST=1` the
quick forms of the quickest, in under five minutes; `python benchmarks/run_all.py --page` only makes
the page from what is in `benchmarks/results/`. What each benchmark does stands at the beginning of
its script. One machine's numbers are never joined with another's.

A number is the median of its repetitions; in brackets the least and the most, and n, how many. Behind
a ratio of its own these are the interval and the seeds. *times better* is the other's over ours where less is better, and ours over the other's where more is: below
1, ours is the worse. *bound* is what ours cannot pass, as the script says it. What a file of an
earlier version has not kept is left out: its spread, machine, commit.
"""
COLUMNS = ("what", "ours", "beside it", "times better", "bound", "target")


def page(entries: Entries, about: Mapping[str, str]) -> str:
    """A section for each machine, and in it one for each benchmark, in the order of `about`."""
    parts = [HEAD]
    for machine in sorted(entries, key=lambda name: (name == UNKNOWN, name)):
        chosen = _chosen(entries[machine], about)
        if chosen:
            parts.append("\n".join(_machine_lines(machine, chosen)))
            parts += ["\n".join(_entry_lines(entry, about[entry.benchmark])) for entry in chosen]
    return "\n".join(parts)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of a table, without the columns that none of them has."""
    if not rows:
        return []
    cells = [_cells(row) for row in rows]
    used = [place for place in range(len(COLUMNS)) if any(one[place] for one in cells)]
    head = [COLUMNS[place] for place in used]
    lines = [head, ["---"] * len(head), *([one[place] for place in used] for one in cells)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _chosen(of_machine: Mapping[str, Entry], about: Mapping[str, str]) -> list[Entry]:
    """The long form of each benchmark, else the quick one."""
    found = (of_machine.get(f"{name} whole") or of_machine.get(f"{name} fast") for name in about)
    return [entry for entry in found if entry is not None]


def _machine_lines(machine: str, entries: Sequence[Entry]) -> list[str]:
    if machine == UNKNOWN:
        return ["## An unknown machine", "", "Measured before results carried their machine, commit and versions.", ""]
    stamps = [entry.stamp for entry in entries if entry.stamp is not None]
    newest = max(stamps, key=lambda stamp: stamp.date)
    return [
        f"## {machine}",
        "",
        f"{newest.machine.line}.",
        "",
        ", ".join(f"{name} {version}" for name, version in newest.versions.items()) + ".",
        "",
    ]


def _entry_lines(entry: Entry, about: str) -> list[str]:
    said = [f"`benchmarks/{entry.benchmark}.py`"]
    if entry.form == "fast":
        said.append("quick form")
    if (stamp := entry.stamp) is not None:
        said += [f"commit {stamp.commit}", stamp.date[:10]]
        said += [stamp.number_type] if stamp.number_type else []
    said += [f"{entry.seconds:.0f} s"] if entry.seconds is not None else []
    lines = [f"### {about}", "", f"{', '.join(said)}.", ""]
    if entry.status != "done":
        lines += [f"**{entry.status}**", ""]
    return [*lines, *table(entry.rows), ""] if entry.rows else lines


def _cells(row: Row) -> list[str]:
    ours, other = (_figure(figure, row.unit) for figure in (row.ours, row.other))
    if row.ratio is not None and (row.ratio.least is not None or row.ratio.n):
        times = _figure(row.ratio, "")
    else:
        times = "" if row.times_better is None else _number(row.times_better)
    bound = "" if row.bound is None else f"{_number(row.bound)} {row.unit}"
    beside = ": ".join(filter(None, (row.other_name, other)))
    return [cell.replace("|", "\\|").strip() for cell in (row.what, ours, beside, times, bound, row.target)]


def _figure(figure: Figure | None, unit: str) -> str:
    if figure is None:
        return ""
    said = f"{_number(figure.value)} {unit}".strip()
    n = f"n={figure.n}" if figure.n else ""
    spread = "" if figure.least is None or figure.most is None else f"{_number(figure.least)} to {_number(figure.most)}"
    inside = ", ".join(filter(None, (spread if figure.n != 1 else "", n)))
    return f"{said} ({inside})" if inside else said


def _number(value: float) -> str:
    """Three digits, or all of a larger number."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:#.3g}".removesuffix(".")
