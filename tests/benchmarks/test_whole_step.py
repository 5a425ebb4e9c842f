"""The parts of whole_step.py: what was measured is kept and gone on with, and what is compared was the same job."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _whole_step_speed
import pytest
import whole_step
from _whole_step_learning import LEARNING
from _whole_step_parts import Asked, Part, Run, label
from _whole_step_runs import ROOT, Clock, Job, Phase, as_ours_renders
from _whole_step_server import SERVER
from _whole_step_speed import SPEED, check_same_job, simulated

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
            summary=lambda runs: {"sum": sum(run["found"] for run in runs)},
            show=lambda result: None,
            rows=lambda result: [],
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


def test_a_part_goes_on_where_it_was_stopped(measured: Measured, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="interrupted"):
        whole_step.measure("speed", ASKED)
    whole_step.measure("speed", Asked(True, (42,), 1))
    kept = json.loads((tmp_path / "whole_step.json").read_text())
    assert kept["speed"]["summary"] is None and whole_step.rows(kept) == [], "half of a part is no answer"
    measured.fails = False
    assert whole_step.measure("speed", ASKED)["summary"] == {"sum": 21}
    assert measured.asked == [0, 1, 0, 1]
    kept = json.loads((tmp_path / "whole_step.json").read_text())
    assert kept["speed (quick)"]["summary"] == {"sum": 10}, "a quick form stands beside the long one"
    whole_step.measure("speed", ASKED)
    assert measured.asked == [0, 1, 0, 1, 0, 1], "with nothing missing, all is measured again"


def test_runs_of_another_commit_are_not_mixed_in(measured: Measured, tmp_path: Path) -> None:
    measured.fails = False
    whole_step.measure("speed", ASKED)
    path = tmp_path / "whole_step.json"
    kept = json.loads(path.read_text())
    kept["speed"]["runs"][0]["commit"] = "another"
    path.write_text(json.dumps(kept))
    whole_step.measure("speed", ASKED)
    assert measured.asked == [0, 1, 0]


def test_rows_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"TRL": 4.0, "0": 2.0, "1": 1.0, "2": 0.5}
    runs = [speed_run(kind, number, seconds[kind]) for number in range(2) for kind in seconds]
    result = {"runs": runs, "summary": SPEED.summary(runs)}
    rows = SPEED.rows(json.loads(json.dumps(result)))
    beside_trl = {row.what: row for row in rows if row.other_name == "TRL"}
    at_once = beside_trl["a step of 64 episodes, a tool call takes 0.0 s, max_staleness 0"]
    assert at_once.times_better == 2.0 and at_once.target == "1.5 times better"
    assert at_once.ours is not None and at_once.ours.n == 4
    slow = next(row for row in rows if "0.5 s, max_staleness 2" in row.what and row.other_name == "max_staleness 0")
    assert slow.bound is not None and 0 < slow.bound < 2.25 and slow.target.endswith("times better")
    SPEED.show(result)


def test_another_job_is_no_comparison() -> None:
    same = [speed_run("TRL", 0, 4.0), speed_run("0", 0, 2.0, calls=[128, 120, 99], sampled_tokens=[6144, 6000, 1])]
    check_same_job(same)
    with pytest.raises(AssertionError, match="sampled_tokens of the first 2 steps differ"):
        check_same_job([*same, speed_run("1", 0, 2.0, sampled_tokens=[6144, 5999])])


def test_what_overlap_could_give() -> None:
    assert simulated(0.0, 8, 2.0, 1.0, 0) == pytest.approx(3.0, rel=0.02)
    assert simulated(0.0, 8, 2.0, 1.0, 1) == pytest.approx(2.0, rel=0.02), "the longer half"
    slow = [simulated(1.0, 64, 0.5, 0.5, k) for k in range(3)]
    assert slow[0] > 1.8 * slow[1] and slow[1] > 1.3 * slow[2]


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
    result: dict[str, Any] = json.loads(json.dumps({"runs": runs, "summary": LEARNING.summary(runs)}))
    rows = {row.what: row for row in LEARNING.rows(result)}
    busy = " (other work took 40% of the machine)"
    sooner = rows[
        f"nano, tools that take no time, max_staleness 1: seconds to 0.9 held-out success, 2 of 2 seeds{busy}"
    ]
    assert sooner.times_better == pytest.approx(2.0) and sooner.ratio is not None and sooner.ratio.n == 2
    assert any("1 of 2 seeds" in what for what in rows), "a seed that never got there is not left out silently"
    final = next(row for what, row in rows.items() if "staleness 1: held-out success after 10 steps" in what)
    assert final.ours is not None and final.ours.value == pytest.approx(0.95)
    assert result["summary"]["ways"]["1"]["better_at_the_end"]["mean"] == pytest.approx(0.01)
    LEARNING.show(result)


def test_rows_of_the_server() -> None:
    def steps(seconds: float) -> dict[str, Any]:
        return {"seconds": {"0.0": [seconds, seconds]}, "rollout_s": {"0.0": [1.2, 1.2]}}

    runs = [{"of": {"round": 0, "episodes": 64, "quick": True}, "other_work": None, "0": steps(2.0), "1": steps(1.5)}]
    result: dict[str, Any] = {"runs": runs, "summary": SERVER.summary(runs)}
    assert result["summary"]["times_the_longer_half"] == pytest.approx(1.25)
    (row,) = SERVER.rows(result)
    assert row.bound == pytest.approx(1.2) and "(quick form)" in row.what and "1.44 s" in row.target
    assert label(result) == " (quick form)"
    SERVER.show(result)


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
