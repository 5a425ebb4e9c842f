"""A benchmark that fails, hangs or says nothing is shown as such, with the rows that it had kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import run_all

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
    "raising_one": (KEEPS_ONE + "raise ValueError", "failed with status 1; the rows", 1, False),
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
