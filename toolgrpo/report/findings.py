"""What the doctor's rules say of a whole run, for the page: a list of
`{rule, sentence, link, steps, filter}`.

The rules and their sentences are those of `observe/doctor.py`. `filter` is what the page's search
shows as examples of a rule: the same words as in a link to the search.
"""

from __future__ import annotations

from typing import Any

from toolgrpo.observe.doctor import over_run
from toolgrpo.report.files import RunPieces

__all__ = ["run_findings"]

# The episodes that show what a rule means.
_EXAMPLES = {
    "world_fails": {"cause": "timeout"},
    "no_tool_calls": {"ready": "nocall"},
    "groups_all_failed": {"success": "no", "ready": "dead"},
    "groups_all_solved": {"success": "yes", "ready": "dead"},
    "groups_all_alike": {"ready": "dead"},
    "cut_by_length": {"ready": "cut"},
    "tool_fails": {"ready": "failedcall"},
    "tool_times_out": {"cause": "timeout"},
    "one_parse_error": {"ready": "failedcall"},
    "void_turns": {"ready": "void"},
    "reward_without_success": {"ready": "hack"},
}


def run_findings(run: RunPieces) -> list[dict[str, Any]]:
    """Return each rule that spoke once, with the last thing it said and the steps it spoke after."""
    logs = [{**_numbers(line["metrics"]), "step": line["step"] + 1} for line in run.steps]
    found = []
    for rule, spoken in over_run(logs).items():
        last = spoken[-1]
        examples: dict[str, Any] = dict(_EXAMPLES.get(rule, {}))
        found.append(
            {
                "rule": rule,
                "sentence": last.sentence,
                "link": last.link,
                "steps": [one.step for one in spoken],
                "filter": {**examples, "from": max(1, last.step - 10), "to": last.step},
            }
        )
    return found


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
