"""A benchmark that fails, hangs or says nothing is shown as such, with the rows that it had kept."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import run_all

SCRIPT = """
import sys
import time
from _reporting import save
from _rows import Figure, Row

def rows(results):
    return [Row(benchmark="{name}", what=f"row {{i}}", ours=Figure(value)) for i, value in enumerate(results["values"])]

if __name__ == "__main__":
    {body}
"""
KEEPS_ONE = 'save("{name}", {{"values": [1.0]}}, quick=True)\n    '
BODIES = {
    "whole_one": (KEEPS_ONE + "pass", "done", 1),
    "failing_one": (KEEPS_ONE + "sys.exit(3)", "failed with status 3; the rows that it had measured until then", 1),
    "hanging_one": (KEEPS_ONE + "time.sleep(600)", "over its limit of ", 1),
    "silent_one": ("pass", "ended well, and wrote no results", 0),
}


@pytest.mark.parametrize("name", BODIES)
def test_how_a_run_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, status, n_rows = BODIES[name]
    (tmp_path / f"{name}.py").write_text(SCRIPT.format(name=name, body=body.format(name=name)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(run_all.__file__).parent))
    for constant, folder in (("HERE", tmp_path), ("RESULTS", tmp_path), ("FAST_RESULTS", tmp_path / "fast")):
        monkeypatch.setattr(run_all, constant, folder)
    monkeypatch.setitem(run_all.TABLE, name, run_all.Benchmark(about="One", minutes=1, fast=(), fast_s=20))
    started = time.monotonic()
    entry = run_all.measured(name, "fast", 4.0 if name == "hanging_one" else 60.0)
    assert entry.status.startswith(status) and len(entry.rows) == n_rows
    assert entry.stamp is not None and time.monotonic() - started < 60
    sys.modules.pop(name, None)
