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
    assert table([row])[2] == "| w | 2.00 s (1.00 to 3.00, n=3) | TRL: 4.00 s | 2.00 | 1.50 s |"


def test_a_quick_form_replaces_no_long_one(tmp_path: Path) -> None:
    write_machine(tmp_path, "small", [entry(value=2.0)])
    write_machine(tmp_path, "small", [entry("fast", value=3.0)])
    found = entries_in(tmp_path, ["tools"])
    assert set(found["small"]) == {"tools whole", "tools fast"}
    assert "2.00 s" in (shown := page(found, {"tools": "Tool calls"})) and "3.00 s" not in shown
    assert "quick form" in page({"small": {"tools fast": entry("fast")}}, {"tools": "Tool calls"})


def test_machines_are_not_mixed_and_what_went_wrong_is_said(tmp_path: Path) -> None:
    write_machine(tmp_path, "small", [entry(status="over its limit of 60 s; the rows that it had measured until then")])
    (tmp_path / "tools.json").write_text((RESULTS / "tools.json").read_text())  # of an earlier version: no stamp
    shown = page(entries_in(tmp_path, ["tools"]), {"tools": "Tool calls"})
    assert "## small" in shown and "AVX2; ONEDNN_MAX_CPU_ISA=AVX2" in shown and "torch 2" in shown
    assert "commit abc, 2026-01-02, float32" in shown
    assert "**over its limit of 60 s; the rows that it had measured until then**" in shown


def test_a_stamp_survives_its_file() -> None:
    stamp = stamp_of(quick=True, number_type="float32")
    assert Stamp.from_json(json.loads(json.dumps(stamp.as_json()))) == stamp
    assert stamp.machine.cores >= 1 and stamp.commit and stamp.versions["torch"]


def test_restricted_machines_have_other_names() -> None:
    about = ("Intel(R) Xeon(R) CPU @ 2.10GHz", "6", "143", 2)
    assert machine_name(*about, {"avx2", "amx_tile"}, {}) == "intel_xeon-6-143-2cores-amx_tile"
    restricted = machine_name(*about, {"avx2"}, {"ATEN_CPU_CAPABILITY": "avx2"})
    assert restricted == "intel_xeon-6-143-2cores-avx2-aten_avx2"
