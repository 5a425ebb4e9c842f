"""A server process on one core, the trainer on another: is a step as long as the longer half (a part of `whole_step.py`).

The halves are those of a training without overlap: its rollouts, and the rest of its steps, weights to the server included.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run, label
from _whole_step_runs import GROUP, Job, Phase, measured, model_folder

STALENESS = (0, 1)
MOST = 1.2  # times the longer half


def plan(asked: Asked) -> list[dict[str, Any]]:
    return [
        {"round": number, "episodes": 32 if asked.quick else 64, "quick": asked.quick}
        for number in range(1 if asked.quick else asked.rounds)
    ]


def measure(of: dict[str, Any]) -> dict[str, Any]:
    from tests.support.vllm_process import VLLMServerProcess

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("a server and a trainer on a core each need two cores; this process may use one")
    found: dict[str, Any] = {}
    server = VLLMServerProcess(
        Path(model_folder("wait")), max_model_len=1024, extra_args=("--block-size", "32"), ready_timeout_s=600.0
    )
    try:
        with inherited(cores[0]):
            server.start()
        for staleness in STALENESS:
            phases = (Phase(0.0, 1 + staleness, 4 if of["quick"] else 8), Phase(1e-9, 1, 0))
            job = Job(
                trainer="ours", episodes=of["episodes"], phases=phases, staleness=staleness, server_url=server.url
            )
            with inherited(cores[1]):
                found[str(staleness)] = measured(job)
    finally:
        server.stop()
    return found


@contextmanager
def inherited(core: int) -> Iterator[None]:
    """Let processes that start now have this core alone, and one thread for it."""
    cores, threads = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


def summary(runs: list[Run]) -> dict[str, Any]:
    plain, ahead = ([run[str(k)] for run in runs] for k in STALENESS)
    steps = [step for one in plain for step in one["seconds"]["0.0"]]
    rollouts = [step for one in plain for step in one["rollout_s"]["0.0"]]
    rest = [step - rollout for step, rollout in zip(steps, rollouts, strict=True)]
    overlapped = [step for one in ahead for step in one["seconds"]["0.0"]]
    longer_s = max(statistics.fmean(rollouts), statistics.fmean(rest))
    return {
        "episodes_a_step": runs[0]["of"]["episodes"],
        "group_size": GROUP,
        "steps": {"0": steps, "1": overlapped},
        "rollouts": rollouts,
        "rest": rest,
        "longer_half_s": longer_s,
        "times_the_longer_half": statistics.fmean(overlapped) / longer_s,
    }


def rows(result: dict[str, Any]) -> list[Row]:
    found = result["summary"]
    job = f"a step of {found['episodes_a_step']} episodes, vllm_server on one core, the trainer on another"
    halves = f"rollouts {statistics.fmean(found['rollouts']):.3g} s, the rest {statistics.fmean(found['rest']):.3g} s"
    return [
        Row(
            benchmark="whole_step",
            what=f"{job}, max_staleness 1 (one after the other: {halves}){label(result)}",
            ours=Figure.of_steps(found["steps"]["1"]),
            other=Figure.of_steps(found["steps"]["0"]),
            other_name="max_staleness 0",
            bound=found["longer_half_s"],
            target=f"at most {MOST * found['longer_half_s']:.3g} s ({MOST} times the longer half)",
        )
    ]


def show(result: dict[str, Any]) -> None:
    found = result["summary"]
    rollouts, rest = (statistics.fmean(found[half]) for half in ("rollouts", "rest"))
    print(
        f"\nserver on one core, trainer on the other{label(result)}: rollouts {rollouts:.2f} s, the rest {rest:.2f} s; a "
        f"step {statistics.fmean(found['steps']['0']):.2f} s, with max_staleness 1 "
        f"{statistics.fmean(found['steps']['1']):.2f} s: {found['times_the_longer_half']:.2f} times the longer half"
    )


SERVER = Part(plan, measure, summary, show, rows)
