"""The page of measurements, docs/measured.md: one table, made from the entries alone, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from _entries import Entries, Entry
from _machine import Stamp
from _rows import Figure, Row

__all__ = ["page", "table"]

MOST_ROWS = 60
HEAD = """\
# Measured

<!-- made by `python benchmarks/run_all.py --page`; not to be edited -->

Ours beside theirs, also where ours is slower. `make bench` measures every benchmark of `benchmarks/` on
your machine and shows all of its rows; the table below keeps a few rows of each, from the worst ratio to
the best, of the newest run whose machine and commit are known.

A number is the median of its repetitions; the spread has the least, the most and how many (n). The ratio
is theirs over ours where less is better, and ours over theirs where more is: below 1, ours is worse.
"""
COLUMNS = ("claim", "ours", "theirs", "ratio", "spread")


def page(entries: Entries, about: Mapping[str, str]) -> str:
    """Make the page: at most MOST_ROWS rows, in the order of `about`, and the machines under them."""
    chosen = [(entry, entry.stamp) for name in about if (entry := _newest(entries, name)) and entry.stamp]
    share = MOST_ROWS // max(1, len(chosen))
    letters: dict[str, str] = {}
    machines: list[str] = []
    lines = _lines([*COLUMNS, "machine", "command, commit, day"], [])
    for entry, stamp in chosen:
        machine = stamp.machine
        if machine.line not in letters:
            letters[machine.line] = chr(ord("A") + len(letters))
            versions = ", ".join(f"{name} {version}" for name, version in stamp.versions.items())
            machines.append(f"{letters[machine.line]}. {machine.line}; {versions}".rstrip("; ") + ".")
        for row in _spread_out(entry.rows, share):
            lines += _lines([*_cells(row), letters[machine.line], _command(entry, stamp)])
    return "\n".join([HEAD, *lines, "", "Machines:", "", *(f"* {line}" for line in machines), ""])


def table(rows: Sequence[Row]) -> list[str]:
    """Return all rows as lines of a table, without the columns that none of them has."""
    if not rows:
        return []
    cells = [_cells(row) for row in rows]
    used = [place for place in range(len(COLUMNS)) if any(one[place] for one in cells)]
    return _lines([COLUMNS[place] for place in used], [], *([one[place] for place in used] for one in cells))


def _lines(*rows: Sequence[str]) -> list[str]:
    """Return rows as lines; an empty one is the rule below the titles."""
    return [f"| {' | '.join(row or ['---'] * len(rows[0]))} |" for row in rows]


def _newest(entries: Entries, name: str) -> Entry | None:
    """Return the newest long form of a benchmark, else the newest quick one, of those that say where they ran."""
    for form in ("whole", "fast"):
        found = [
            of[key] for of in entries.values() if (key := f"{name} {form}") in of and of[key].stamp and of[key].rows
        ]
        if found:
            return max(found, key=lambda entry: (entry.stamp.date if entry.stamp else "", entry.machine))
    return None


def _spread_out(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most so many rows, those with a ratio first: the worst, the best, and evenly between; in their order."""
    compared = [row for row in rows if row.times_better is not None]
    ordered = sorted(compared, key=lambda row: row.times_better or 0.0) or list(rows)
    if len(ordered) <= most:
        rest = [row for row in rows if row not in ordered][: most - len(ordered)]
        kept = [*ordered, *rest]
    else:
        last = len(ordered) - 1
        kept = [ordered[round(place * last / max(1, most - 1))] for place in range(most)]  # the worst first
    return [row for row in rows if row in kept]


def _command(entry: Entry, stamp: Stamp) -> str:
    said = [f"`benchmarks/{entry.benchmark}.py`", stamp.commit, stamp.date[:10]]
    said += ["quick form"] if entry.form == "fast" else []
    said += [stamp.number_type] if stamp.number_type else []
    said += [entry.status] if entry.status != "done" else []
    return ", ".join(said)


def _cells(row: Row) -> list[str]:
    claim = row.what + (f" (target: {row.target})" if row.target else "")
    claim += "" if row.bound is None else f" (bound: {_number(row.bound)} {row.unit})"
    ours, theirs = ("" if one is None else f"{_number(one.value)} {row.unit}".strip() for one in (row.ours, row.other))
    ratio = "" if row.times_better is None else _number(row.times_better)
    figures = {"ours": row.ours, "theirs": row.other, "ratio": row.ratio}
    spread = ", ".join(f"{name} {said}" for name, figure in figures.items() if figure and (said := _spread(figure)))
    beside = ": ".join(filter(None, (row.other_name, theirs)))
    return [cell.replace("|", "\\|").strip() for cell in (claim, ours, beside, ratio, spread)]


def _spread(figure: Figure) -> str:
    between = (
        "" if figure.least is None or figure.most is None else f"{_number(figure.least)} to {_number(figure.most)}"
    )
    n = f"n={figure.n}" if figure.n else ""
    return f"{between if figure.n != 1 else ''} {f'({n})' if n else ''}".strip()


def _number(value: float) -> str:
    """Three digits, or all of a larger number."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:#.3g}".removesuffix(".")
