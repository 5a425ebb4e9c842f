"""Every benchmark makes rows of the JSON that is in the repository."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from _machine import machine_name, stamp_of
from _reporting import RESULTS
from _rows import Figure, Row, table
from run_all import TABLE, rows_of

SCRIPTS = {path.stem for path in RESULTS.parent.glob("[a-z]*.py")} - {"run_all", "gpu_proof"}


def test_every_script_has_an_entry() -> None:
    assert set(TABLE) == SCRIPTS, "benchmarks/run_all.py runs all of them"


@pytest.mark.parametrize("name", [name for name in TABLE if (RESULTS / f"{name}.json").exists()])
def test_rows_of_the_repository(name: str) -> None:
    rows = rows_of(name, json.loads((RESULTS / f"{name}.json").read_text()))
    assert rows
    assert len({(row.what, row.other_name, row.unit) for row in rows}) == len(rows), "each row says what it is"
    for row in rows:
        assert row.ours is not None or row.ratio is not None


def test_seeds_have_an_interval_and_one_seed_has_none() -> None:
    gain = Figure.of_seeds([0.1, 0.2, 0.3])
    assert gain.signed == "+0.200 [-0.048, +0.448]" and gain.n == 3, "0.2 and 4.303 times 0.1 / sqrt(3)"
    ratio = Figure.of_ratios([(2.0, 1.0), (8.0, 1.0)])
    assert ratio.value == pytest.approx(4.0) and ratio.least is not None and ratio.least < 1
    assert Figure.of_ratios([(2.0, 1.0)]) == Figure(2.0, n=1) and Figure.of_seeds([0.1]).signed == "+0.100"


def test_slower_is_below_one() -> None:
    row = Row("w", ours=Figure(2.0), other=Figure(1.0))
    assert row.times_better == 0.5
    assert replace(row, more_is_better=True).times_better == 2.0
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
