"""A server process on one core, the trainer on another: is a step as long as the longer half (a part of `whole_step.py`).

The halves are those of a training without overlap: its rollouts, and the rest of its steps, weights to the server included.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run, label
from _whole_step_runs import Job, Phase, measured

STALENESS = (0, 1)


def plan(asked: Asked) -> list[dict[str, Any]]:
    return [
        {"round": number, "episodes": 32 if asked.quick else 64, "quick": asked.quick}
        for number in range(1 if asked.quick else asked.rounds)
    ]


def measure(of: dict[str, Any]) -> dict[str, Any]:
    from tests.support.vllm_process import VLLMServerProcess
    from toolgrpo.models import NANO

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("a server and a trainer on a core each need two cores; this process may use one")
    found: dict[str, Any] = {}
    server = VLLMServerProcess(NANO, max_model_len=1024, extra_args=("--block-size", "32"), ready_timeout_s=600.0)
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


def rows(runs: list[Run]) -> list[Row]:
    def steps(staleness: int, what: str = "seconds") -> list[float]:
        return [step for run in runs for step in run[str(staleness)][what]["0.0"]]

    rollouts_s = statistics.fmean(steps(0, "rollout_s"))
    rest_s = statistics.fmean(steps(0)) - rollouts_s
    halves = f"one after the other: rollouts {rollouts_s:.3g} s, the rest {rest_s:.3g} s"
    job = f"a step of {runs[0]['of']['episodes']} episodes, vllm_server on one core, the trainer on another"
    what, (other, ours) = (
        f"{job}, max_staleness 1 ({halves}){label(runs)}",
        (Figure.of_steps(steps(k)) for k in STALENESS),
    )
    return [Row(what, ours, "s", other, "max_staleness 0", bound=max(rollouts_s, rest_s))]


SERVER = Part(plan, measure, rows)
