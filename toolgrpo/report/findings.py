"""What the doctor's rules say of a whole run, for the page: a list of
`{rule, sentence, link, steps, filter}`.

The rules and their sentences are those of `observe/doctor.py`. `filter` is what the page's search
shows as examples of a rule: the same words as in a link to the search.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolgrpo.observe.doctor import over_run

# The episodes that show what a rule means.
_EXAMPLES = {
    "world_fails": {"cause": "timeout"},
    "no_tool_calls": {"ready": "nocall"},
    "groups_all_failed": {"success": "no", "ready": "dead"},
    "groups_all_solved": {"success": "yes", "ready": "dead"},
    "groups_all_alike": {"ready": "dead"},
    "broken_calls": {"ready": "failedcall"},
    "cut_by_length": {"ready": "cut"},
    "tool_fails": {"ready": "failedcall"},
    "tool_times_out": {"cause": "timeout"},
    "void_turns": {"ready": "void"},
    "reward_without_success": {"ready": "hack"},
}


def run_findings(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each rule that spoke once, with the last thing it said and the steps it spoke after.

    `lines` are those of `steps.jsonl`.
    """
    logs = ({**_numbers(line["metrics"]), "step": line["step"] + 1} for line in lines if line["kind"] == "step")
    found: dict[str, dict[str, Any]] = {}
    for spoken in over_run(logs):
        steps = [*found.get(spoken.rule, {"steps": []})["steps"], spoken.step]
        found[spoken.rule] = {
            "rule": spoken.rule,
            "sentence": spoken.sentence,
            "link": spoken.link,
            "steps": steps,
            "filter": {"from": max(1, spoken.step - 10), "to": spoken.step, **_EXAMPLES.get(spoken.rule, {})},
        }
    return list(found.values())


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}
