"""Every benchmark makes rows of the JSON that is in the repository; one that fails, hangs or says nothing is shown as such."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import run_all
from _machine import machine_name, stamp_of
from _reporting import RESULTS
from _rows import Figure, Row, table

SCRIPTS = {path.stem for path in RESULTS.parent.glob("[a-z]*.py")} - {"run_all", "gpu_proof"}


def test_every_script_has_an_entry() -> None:
    assert set(run_all.TABLE) == SCRIPTS, "benchmarks/run_all.py runs all of them"


@pytest.mark.parametrize("name", [name for name in run_all.TABLE if (RESULTS / f"{name}.json").exists()])
def test_rows_of_the_repository(name: str) -> None:
    rows = run_all.rows_of(name, json.loads((RESULTS / f"{name}.json").read_text()))
    assert rows and len({(row.what, row.other_name, row.unit) for row in rows}) == len(rows), "each row says what it is"
    assert all(row.ours is not None or row.ratio is not None for row in rows)


def test_seeds_have_an_interval_and_one_seed_has_none() -> None:
    gain = Figure.of_seeds([0.1, 0.2, 0.3])
    assert gain.signed == "+0.200 [-0.048, +0.448]" and gain.n == 3, "0.2 and 4.303 times 0.1 / sqrt(3)"
    ratio = Figure.of_ratios([(2.0, 1.0), (8.0, 1.0)])
    assert ratio.value == pytest.approx(4.0) and ratio.least is not None and ratio.least < 1
    assert Figure.of_ratios([(2.0, 1.0)]) == Figure(2.0, n=1) and Figure.of_seeds([0.1]).signed == "+0.100"


def test_slower_is_below_one() -> None:
    row = Row("w", ours=Figure(2.0), other=Figure(1.0))
    assert row.times_better == 0.5 and replace(row, more_is_better=True).times_better == 2.0
    assert Row("w", ours=Figure(2.0)).times_better is None


def test_a_row_says_spread_and_repetitions() -> None:
    row = Row("w", ours=Figure.of([1.0, 3.0, 2.0]), other=Figure(4.0), other_name="TRL", bound=1.5)
    assert table([row])[2] == "| w | 2.00 s (1.00 to 3.00, n=3) | TRL: 4.00 s | 2.00 | 1.50 s |"


def test_a_stamp_says_machine_commit_and_versions() -> None:
    stamp = stamp_of(quick=True, number_type="float32")
    json.dumps(stamp.as_json())
    assert stamp.machine.cores >= 1 and stamp.commit and stamp.versions["torch"]


def test_restricted_machines_have_other_names() -> None:
    about = ("Intel(R) Xeon(R) CPU @ 2.10GHz", "6", "143", 2)
    assert machine_name(*about, {"avx2", "amx_tile"}, {}) == "intel_xeon-6-143-2cores-amx_tile"
    restricted = machine_name(*about, {"avx2"}, {"ATEN_CPU_CAPABILITY": "avx2"})
    assert restricted == "intel_xeon-6-143-2cores-avx2-aten_avx2"


SCRIPT = """
import sys
import time
from _reporting import save
from _rows import Figure, Row

def rows(results):
    return [Row(f"row {{i}}", Figure(value)) for i, value in enumerate(results["values"])]

if __name__ == "__main__":
    {body}
"""
KEEPS_ONE = 'save("{name}", {{"values": [1.0]}}, quick=True)\n    '
BODIES = {  # its status, its rows, and whether all is well
    "whole_one": (KEEPS_ONE + "pass", "done", 1, True),
    "failing_one": (KEEPS_ONE + "sys.exit(3)", "failed with status 3; the rows that it had measured until then", 1, False),
    "hanging_one": (KEEPS_ONE + "time.sleep(600)", "not reached in ", 1, True),
    "silent_one": ("pass", "ended well, and wrote no results", 0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_how_a_run_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, status, n_rows, well = BODIES[name]
    (tmp_path / f"{name}.py").write_text(SCRIPT.format(name=name, body=body.format(name=name)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(run_all.__file__).parent))
    for constant, folder in (("HERE", tmp_path), ("RESULTS", tmp_path), ("QUICK_RESULTS", tmp_path / "fast")):
        monkeypatch.setattr(run_all, constant, folder)
    for limit_s in (3, 30, 240) if name == "hanging_one" else (240,):  # until it has time to keep its row
        one = run_all.Benchmark(about="One", minutes=1, fast=(), fast_s=limit_s / 3)
        monkeypatch.setitem(run_all.TABLE, name, one)
        entry = run_all.measured(name, "fast", limit_s)
        if len(entry.rows) == n_rows:
            break
    assert entry.status.startswith(status) and len(entry.rows) == n_rows
    assert run_all.is_well(entry) == well
    sys.modules.pop(name, None)


def test_what_the_time_of_all_leaves_out_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "FAST_S", 0.0)
    assert run_all.run(["tools", "chat"], "fast")
    assert capsys.readouterr().out.count("not reached: the time of all was over") == 2
