"""What a training came to: the numbers of its own steps, the first measurement also after a resume,
and what the doctor still finds wrong at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolgrpo.observe.watch import DoctorWatch

__all__ = ["FILE", "doctor_lines", "doctor_summary", "first_table", "steps_line"]

FILE = "summary.json"


def first_table(output_dir: Path, resumes: object) -> dict[str, Any]:
    """Return what was measured before the first step of the run that is resumed, if it is known."""
    if not resumes or not any(output_dir.glob("checkpoint-*")):
        return {}
    try:
        before = json.loads((output_dir / FILE).read_text())["before"]
        return {name: dict(rate) for name, rate in before.items() if {"rate", "interval", "n"} <= set(rate)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def steps_line(summary: Mapping[str, Any]) -> str:
    """Return the line of the steps of this run, which may be the end of a longer one."""
    own, reached, seconds = summary["steps"], summary["reached"], summary["seconds_per_step"]
    said = f"{own} step{'' if own == 1 else 's'}" + (f" (now {reached})" if reached != own else "")
    if own:
        said += f", {seconds['all']:.2f} s each (rollout {seconds['rollout']:.2f}, training {seconds['training']:.2f})"
    return f"{said}; {summary['seconds_in_all']:.0f} s in all"


def doctor_summary(doctor: DoctorWatch) -> dict[str, Any]:
    """Return what the doctor says of the whole run, as JSON."""
    return {
        "learned_nothing": doctor.learned_nothing,
        "findings": [
            {"rule": one.rule, "step": one.step, "sentence": one.sentence, "link": one.link}
            for one in (*doctor.told, *(one for one in doctor.at_end() if one not in doctor.told))
        ],
    }


def doctor_lines(doctor: DoctorWatch) -> list[str]:
    """Return what a person is told at the end: that nothing was learned, and what is still wrong."""
    lines = ["doctor    nothing was learned: in no step did the episodes of a group differ in reward"]
    at_end = [f"doctor    {finding.sentence} ({finding.link})" for finding in doctor.at_end()]
    return [*(lines if doctor.learned_nothing else []), *at_end]
