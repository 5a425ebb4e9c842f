"""What the doctor says at the end of a training: that nothing was learned, and what is still wrong."""

from __future__ import annotations

from typing import Any

from toolgrpo.observe.watch import DoctorWatch

__all__ = ["doctor_lines", "doctor_summary"]


def doctor_summary(doctor: DoctorWatch) -> dict[str, Any]:
    """Return what the doctor says of the whole run, as JSON."""
    at_end = doctor.at_end()
    rules = {one.rule for one in at_end}
    return {
        "learned_nothing": doctor.learned_nothing,
        "findings": [
            {
                "rule": one.rule,
                "step": one.step,
                "sentence": one.sentence,
                "link": one.link,
                "still_holds": one.rule in rules,
            }
            for one in (*doctor.told, *(one for one in at_end if one not in doctor.told))
        ],
    }


def doctor_lines(doctor: DoctorWatch) -> list[str]:
    """Return what a person is told at the end."""
    nothing = ["doctor    nothing was learned: in no step did the episodes of a group differ in reward"]
    at_end = [f"doctor    {finding.sentence} ({finding.link_here})" for finding in doctor.at_end()]
    return [*(nothing if doctor.learned_nothing else []), *at_end]
