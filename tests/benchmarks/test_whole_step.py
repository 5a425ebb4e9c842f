"""The parts of whole_step.py: what was measured is kept and gone on with, and what is compared was the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _reporting
import _whole_step_speed
import pytest
import whole_step
from _machine import ROOT
from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run
from _whole_step_runs import as_ours_renders
from _whole_step_speed import check_same_job

ASKED = Asked(quick=False, seeds=(42, 1), rounds=2)


def speed_run(kind: str, number: int, **changes: Any) -> Run:
    of = {"kind": kind, "round": number, "episodes": 64, "tools": "wait", "quick": False}
    return {"of": of, "calls": [128, 120], "sampled_tokens": [6144, 6000], **changes}


class Measured:
    """A part of two runs, of which the second can fail."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails = True
        self.part = Part(
            plan=lambda asked: [{"number": number, "quick": asked.quick} for number in range(asked.rounds)],
            measure=self.measure,
            rows=lambda runs: [Row("sum", Figure(sum(run["found"] for run in runs)))],
        )

    def measure(self, of: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(of["number"])
        if of["number"] == 1 and self.fails:
            raise SystemExit("interrupted")
        return {"found": 10 + of["number"]}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    made = Measured()
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setitem(whole_step.PARTS, "speed", made.part)
    return made


def kept() -> dict[str, Any]:
    return _reporting.kept(whole_step.NAME, False)


def test_a_part_goes_on_where_it_was_stopped(measured: Measured) -> None:
    with pytest.raises(SystemExit, match="interrupted"):
        whole_step.measure_part("speed", ASKED)
    assert whole_step.rows(kept()) == [], "half of a part is no answer"
    measured.fails = False
    whole_step.measure_part("speed", ASKED)
    assert whole_step.rows(kept()) == [Row("sum", Figure(21))]
    assert measured.asked == [0, 1, 1], "what was measured is kept"
    whole_step.measure_part("speed", ASKED)
    assert measured.asked == [0, 1, 1, 0, 1], "with nothing missing, all is measured again"


def test_runs_of_another_commit_are_not_mixed_in(measured: Measured, tmp_path: Path) -> None:
    measured.fails = False
    whole_step.measure_part("speed", ASKED)
    before = kept()
    before["speed"]["runs"][0]["commit"] = "another"
    (tmp_path / "whole_step.json").write_text(json.dumps(before))
    whole_step.measure_part("speed", ASKED)
    assert measured.asked == [0, 1, 0]


def test_another_job_is_no_comparison() -> None:
    same = [speed_run("TRL", 0), speed_run("0", 0, calls=[128, 120, 99], sampled_tokens=[6144, 6000, 1])]
    check_same_job(same)
    with pytest.raises(AssertionError, match="sampled_tokens of the first 2 steps differ"):
        check_same_job([*same, speed_run("1", 0, sampled_tokens=[6144, 5999])])


def test_overlapping_phases_end_where_nothing_is_begun_ahead() -> None:
    comparison = _whole_step_speed.Comparison("wait", (0.0, 0.5), (0, 1, 2), 64, 32)
    for kind in ("0", "1", "2"):
        *measured, last = comparison.phases(kind, quick=True)
        assert last.measured == 0 and last.warm == 2 and [one.warm for one in measured] == [1 + int(kind)] * 2


def test_trl_renders_the_prompt_that_nano_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a function returns in the schema, nano calls no tool in TRL's trainer."""
    from transformers.utils import get_json_schema

    from toolgrpo.tools import load_tools

    monkeypatch.syspath_prepend(str(ROOT))
    from tools_funcs.arithmetic_tools import TOOL_FUNCTIONS

    with load_tools(ROOT / "tools_funcs" / "arithmetic_tools.py") as toolbox:
        assert [get_json_schema(as_ours_renders(one)) for one in TOOL_FUNCTIONS] == toolbox.schemas
    assert as_ours_renders(TOOL_FUNCTIONS[0])(2, 3) == 5
