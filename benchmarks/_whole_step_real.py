"""A step of a real shape: a model of half a billion weights with LoRA and eight financial tools (a part of `whole_step.py`)."""

from __future__ import annotations

from typing import Any

from _rows import Figure, Row
from _whole_step_parts import Asked, Part, Run, label
from _whole_step_runs import Job, Phase, measured
from _whole_step_speed import check_same_job, steps_of

KINDS = ("TRL", "0")
EPISODES = (8, 16)


def plan(asked: Asked) -> list[dict[str, Any]]:
    if not asked.model:
        raise SystemExit("--part real needs --model FOLDER, of Qwen2.5-Coder-0.5B-Instruct for the published numbers")
    return [
        {"kind": kind, "episodes": n, "model": asked.model, "quick": asked.quick}
        for n in (EPISODES[:1] if asked.quick else EPISODES)
        for kind in KINDS
    ]


def measure(of: dict[str, Any]) -> dict[str, Any]:
    """One step, in which vLLM and PyTorch warm up too: TRL's takes many minutes."""
    return measured(
        Job(
            trainer="TRL" if of["kind"] == "TRL" else "ours",
            episodes=of["episodes"],
            phases=(Phase(0.0, 0, 1),),
            tools="financial",
            model=of["model"],
            lora=True,
        )
    )


def rows(runs: list[Run]) -> list[Row]:
    made = []
    for n in sorted({run["of"]["episodes"] for run in runs}):
        of_n = [run for run in runs if run["of"]["episodes"] == n]
        check_same_job(of_n)
        seconds = {kind: Figure.of_steps(steps_of(of_n, kind, 0.0)) for kind in KINDS}
        memory = {
            kind: Figure.of_steps([run["peak_gib"] for run in of_n if run["of"]["kind"] == kind]) for kind in KINDS
        }
        job = f"a step of {n} episodes, a real model with LoRA, eight financial tools"
        made.append(Row(f"{job}{label(of_n)}", seconds["0"], "s", seconds["TRL"], "TRL"))
        made.append(Row(f"{job}: peak memory{label(of_n)}", memory["0"], "GiB", memory["TRL"], "TRL"))
    return made


REAL = Part(plan, measure, rows)
