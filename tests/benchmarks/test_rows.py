"""Every benchmark makes rows of the JSON that is in the repository, and the page is made of these alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from _entries import Entry, entries_in, rows_of, write_machine
from _machine import Machine, Stamp, machine_name, stamp_of
from _page import page, table
from _rows import Figure, Row
from run_all import PAGE, RESULTS, TABLE, made_page

SCRIPTS = {path.stem for path in RESULTS.parent.glob("[a-z]*.py")} - {"run_all", "credit_picture", "gpu_proof"}
MACHINE = Machine("small", "A processor", 2, 24, ("AVX2",), {"ONEDNN_MAX_CPU_ISA": "AVX2"})


def entry(form: str = "whole", status: str = "done", date: str = "2026-01-02", value: float = 2.0) -> Entry:
    stamp = Stamp(MACHINE, "abc", date, form == "fast", "float32", {"torch": "2"})
    row = Row(benchmark="tools", what="a call", ours=Figure(value), other=Figure(6.0), other_name="TRL")
    return Entry("tools", "fast" if form == "fast" else "whole", status, (row,), stamp, 3.0)


def test_every_script_has_an_entry() -> None:
    assert set(TABLE) == SCRIPTS, "benchmarks/run_all.py runs all of them"


@pytest.mark.parametrize("name", [name for name in TABLE if (RESULTS / f"{name}.json").exists()])
def test_rows_of_the_repository(name: str) -> None:
    rows = rows_of(name, json.loads((RESULTS / f"{name}.json").read_text()))
    assert rows and {row.benchmark for row in rows} == {name}
    assert len({(row.what, row.other_name, row.unit) for row in rows}) == len(rows), "each row says what it is"
    for row in rows:
        assert row.ours is not None or row.ratio is not None
        assert Row.from_json(json.loads(json.dumps(row.as_json()))) == row


def test_the_page_is_made_of_what_is_there() -> None:
    assert PAGE.read_text() == made_page(), "run python benchmarks/run_all.py --page"


def test_slower_is_below_one() -> None:
    row = Row(benchmark="b", what="w", ours=Figure(2.0), other=Figure(1.0))
    assert row.times_better == 0.5
    assert replace(row, more_is_better=True).times_better == 2.0
    assert Row(benchmark="b", what="w", ours=Figure(2.0)).times_better is None


def test_a_row_says_spread_and_repetitions() -> None:
    row = Row(benchmark="b", what="w", ours=Figure.of([1.0, 3.0, 2.0]), other=Figure(4.0), other_name="TRL", bound=1.5)
    assert table([row])[2] == "| w (bound: 1.50 s) | 2.00 s | TRL: 4.00 s | 2.00 | ours 1.00 to 3.00 (n=3) |"


def test_a_quick_form_replaces_no_long_one(tmp_path: Path) -> None:
    write_machine(tmp_path, "small", [entry(value=2.0)])
    write_machine(tmp_path, "small", [entry("fast", value=3.0)])
    found = entries_in(tmp_path, ["tools"])
    assert set(found["small"]) == {"tools whole", "tools fast"}
    assert "2.00 s" in (shown := page(found, {"tools": "Tool calls"})) and "3.00 s" not in shown
    assert "quick form" in page({"small": {"tools fast": entry("fast")}}, {"tools": "Tool calls"})


def test_each_row_of_the_page_says_where_it_comes_from(tmp_path: Path) -> None:
    write_machine(tmp_path, "small", [entry(status="over its limit of 60 s; the rows that it had measured until then")])
    (tmp_path / "tools.json").write_text((RESULTS / "tools.json").read_text())  # of an earlier version: no stamp
    shown = page(entries_in(tmp_path, ["tools"]), {"tools": "Tool calls"})
    (row,) = [line for line in shown.splitlines() if line.startswith("| a call")]
    status = "over its limit of 60 s; the rows that it had measured until then"
    assert row.endswith(f"| A | `benchmarks/tools.py`, abc, 2026-01-02, float32, {status} |")
    assert "* A. A processor, 2 cores, 24 GiB; AVX2; ONEDNN_MAX_CPU_ISA=AVX2; torch 2." in shown
    assert "| --- |" in page({}, {}) and shown.count("\n| ") == 3, "a row without machine and commit has no place"


@pytest.mark.parametrize("n_benchmarks", [1, 2, 7, 30, 60])
@pytest.mark.parametrize("n_rows", [1, 3, 100])
def test_the_page_has_one_table_of_few_rows_the_worst_among_them(n_benchmarks: int, n_rows: int) -> None:
    whole = entry()
    rows = [Row(benchmark="b", what=f"w{n}", ours=Figure(1.0 + n), other=Figure(10.0)) for n in range(n_rows)]
    names = {f"benchmark{n}": "" for n in range(n_benchmarks)}
    found = {"small": {f"{name} whole": replace(whole, benchmark=name, rows=tuple(rows)) for name in names}}
    lines = [line for line in page(found, names).splitlines() if line.startswith("| w")]
    assert min(60, n_benchmarks * n_rows) * 0.5 <= len(lines) <= 60 and len(set(lines)) == len(lines)
    if n_benchmarks < 60:
        assert sum(line.startswith(f"| w{n_rows - 1} ") for line in lines) == n_benchmarks, "the worst of each"


def test_a_stamp_survives_its_file() -> None:
    stamp = stamp_of(quick=True, number_type="float32")
    assert Stamp.from_json(json.loads(json.dumps(stamp.as_json()))) == stamp
    assert stamp.machine.cores >= 1 and stamp.commit and stamp.versions["torch"]


def test_restricted_machines_have_other_names() -> None:
    about = ("Intel(R) Xeon(R) CPU @ 2.10GHz", "6", "143", 2)
    assert machine_name(*about, {"avx2", "amx_tile"}, {}) == "intel_xeon-6-143-2cores-amx_tile"
    restricted = machine_name(*about, {"avx2"}, {"ATEN_CPU_CAPABILITY": "avx2"})
    assert restricted == "intel_xeon-6-143-2cores-avx2-aten_avx2"
