"""The parts of whole_step.py: what was measured is kept and gone on with, and what is compared was the same job."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _reporting
import _whole_step_speed
import pytest
import whole_step
from _machine import ROOT
from _rows import Figure, Row
from _whole_step_learning import LEARNING
from _whole_step_parts import Asked, Part, Run, label, other_work
from _whole_step_runs import Clock, Job, Phase, as_ours_renders
from _whole_step_server import SERVER
from _whole_step_speed import SPEED, check_same_job

ASKED = Asked(quick=False, seeds=(42, 1), rounds=2)


def speed_run(kind: str, number: int, seconds: float, **changes: Any) -> Run:
    of = {"kind": kind, "round": number, "episodes": 64, "tools": "wait", "quick": False}
    times = {str(latency): [seconds, seconds + latency] for latency in (0.0, 0.1, 0.5)}
    counts = {"calls": [128, 120], "sampled_tokens": [6144, 6000]}
    rollouts = {} if kind == "TRL" else {"0.0": [seconds / 2]}
    return {
        "of": of,
        "other_work": 0.02,
        "seconds": times,
        "processor_s": times,
        "rollout_s": rollouts,
        **counts,
        **changes,
    }


def learning_run(seed: int, staleness: int, seconds: float, final: float) -> Run:
    curve = [
        {"step": 5, "episodes": 320, "seconds": seconds / 2, "success": 0.8},
        {"step": 10, "episodes": 640, "seconds": seconds, "success": final},
    ]
    reached = curve[1] if final >= 0.9 else None
    of = {"seed": seed, "way": str(staleness), "latency_s": 0.0, "quick": False}
    return {"of": of, "other_work": 0.4, "curve": curve, "reached": reached}


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


def test_other_work_is_a_share_of_the_machine() -> None:
    with other_work() as share:
        time.sleep(0.05)
    assert len(share) <= 1 and all(0 <= one <= 1 for one in share)


def test_rows_of_the_speed() -> None:
    seconds = {"TRL": 4.0, "0": 2.0, "1": 1.0, "2": 0.5}
    runs = [speed_run(kind, number, seconds[kind]) for number in range(2) for kind in seconds]
    rows = SPEED.rows(json.loads(json.dumps(runs)))
    beside_trl = {row.what: row for row in rows if row.other_name == "TRL"}
    at_once = beside_trl["a step of 64 episodes, a tool call takes 0.0 s, max_staleness 0"]
    assert at_once.times_better == 2.0 and at_once.ours is not None and at_once.ours.n == 4
    slow = next(row for row in rows if "0.5 s, max_staleness 2" in row.what and row.other_name == "max_staleness 0")
    assert slow.times_better == 3.0, "2 and 2.5 beside 0.5 and 1"


def test_another_job_is_no_comparison() -> None:
    same = [speed_run("TRL", 0, 4.0), speed_run("0", 0, 2.0, calls=[128, 120, 99], sampled_tokens=[6144, 6000, 1])]
    check_same_job(same)
    with pytest.raises(AssertionError, match="sampled_tokens of the first 2 steps differ"):
        check_same_job([*same, speed_run("1", 0, 2.0, sampled_tokens=[6144, 5999])])


def test_trls_trainer_learns_where_that_takes_minutes() -> None:
    """With tools of 0.1 s on one seed, with tools of 0.5 s not at all."""
    with_trl = {
        name: [run["seed"] for run in part.plan(ASKED) if run["way"] == "TRL"]
        for name, part in whole_step.PARTS.items()
        if name.endswith("learning")
    }
    assert with_trl == {"learning": [42, 1], "tenth_learning": [42], "slow_learning": []}


def test_rows_of_the_learning() -> None:
    finals = {(42, 0): 0.95, (1, 0): 0.93, (42, 1): 0.94, (1, 1): 0.96, (42, 2): 0.5, (1, 2): 0.9}
    runs = [learning_run(seed, k, 100.0 / (k + 1), final) for (seed, k), final in finals.items()]
    rows = {row.what: row for row in LEARNING.rows(json.loads(json.dumps(runs)))}
    busy = " (other work took 40% of the machine)"
    sooner = rows[
        f"nano, tools that take no time, max_staleness 1: seconds to 0.9 held-out success, 2 of 2 seeds{busy}"
    ]
    assert sooner.times_better == pytest.approx(2.0) and sooner.ratio is not None and sooner.ratio.n == 2
    assert any("1 of 2 seeds" in what for what in rows), "a seed that never got there is not left out silently"
    final = next(row for what, row in rows.items() if "staleness 1: held-out success after 10 steps" in what)
    assert final.ours is not None and final.ours.value == pytest.approx(0.95)
    assert any("+0.010 [" in what for what in rows), "how much better it is at the end"


def test_rows_of_the_server() -> None:
    def steps(seconds: float) -> dict[str, Any]:
        return {"seconds": {"0.0": [seconds, seconds]}, "rollout_s": {"0.0": [1.2, 1.2]}}

    runs = [{"of": {"round": 0, "episodes": 64, "quick": True}, "other_work": None, "0": steps(2.0), "1": steps(1.5)}]
    (row,) = SERVER.rows(runs)
    assert row.bound == pytest.approx(1.2) and "(quick form)" in row.what and row.times_better == pytest.approx(4 / 3)
    assert label(runs) == " (quick form)"


def test_steps_are_counted_by_their_phases() -> None:
    job = Job(trainer="ours", episodes=8, phases=(Phase(0.0, 1, 2), Phase(0.5, 2, 0)), staleness=2)
    assert Job.from_json(json.dumps(asdict(job))) == job and job.steps == 5
    clock = Clock(job.phases)
    for step in range(job.steps):
        clock.begin(step)
        clock.end(step, 1.0)
    assert clock.latency_s == 0.5 and len(clock.seconds[0.0]) == 2 and 0.5 not in clock.seconds


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

    toolbox = load_tools(ROOT / "tools_funcs" / "arithmetic_tools.py")
    try:
        assert [get_json_schema(as_ours_renders(one)) for one in TOOL_FUNCTIONS] == toolbox.schemas
    finally:
        toolbox.close()
    assert as_ours_renders(TOOL_FUNCTIONS[0])(2, 3) == 5
