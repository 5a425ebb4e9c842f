"""What is said at the end of a training: that held-out success did not rise, or nothing was learned, and
what is still wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolgrpo.observe.doctor import page_here
from toolgrpo.observe.watch import DoctorWatch


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


def outcome_line(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return what is to be said under the table of held-out success, if it did not clearly rise.

    It rose where an interval after lies above the one before; both hold `rate` and `interval` by name.
    """
    both = [name for name in before if name in after]
    if not both or any(after[name]["interval"][0] > before[name]["interval"][1] for name in both):
        return None
    fell = [name for name in both if after[name]["interval"][1] < before[name]["interval"][0]]
    lower = [name for name in both if after[name]["rate"] < before[name]["rate"]]
    if fell:
        said = f"held-out success fell ({', '.join(fell)})"
    else:
        below = f"; {' and '.join(lower)} went down" if lower else ""
        said = f"held-out success did not clearly change (the intervals overlap{below})"
    return f"{said}: see {page_here('held-out-success-does-not-rise')}"
