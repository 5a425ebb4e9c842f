"""Each rule speaks of a run that has its trouble, with the numbers in the sentence, and of a healthy run none does."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import toolgrpo
from tests.support.tool_calls import attempt
from toolgrpo.episode.token_ledger import Ledger
from toolgrpo.episode.tool_calls import AttemptStatus, CallAttempt
from toolgrpo.episode.trajectory import StopReason, Trajectory, Turn
from toolgrpo.observe.call_lookalikes import FORMS, count_lookalikes, lookalike_form
from toolgrpo.observe.doctor import RULES, Log, Logs, findings, over_run
from toolgrpo.support.shipped_files import TROUBLESHOOTING

ROOT = Path(toolgrpo.__file__).parents[1]

HEALTHY = {
    **{"reward": 0.5, "reward_std": 0.4, "reward/groups_without_spread": 0.2, "success": 0.4, "entropy": 0.6},
    **{"stop/length": 0.02, "stop/length_of_turn": 0.0, "stop/context_full": 0.0, "stop/engine_failure": 0.0},
    **{"completions/mean_length": 40.0, "rollout/sampled_tokens": 2560.0},  # 64 episodes
    **{"tools/call_frequency": 1.5, "tools/failure_frequency": 0.1, "tools/latency_p95": 0.1, "tools/unmarked": 0.0},
    **{
        "tools/add/calls": 60.0,
        "tools/add/failures": 6.0,
        "tools/multiply/calls": 36.0,
        "tools/multiply/failures": 3.0,
    },
    **{"tools/error/invalid_json": 4.0, "tools/error/raised": 5.0, "turns/void": 0.01, "answers/copied_result": 0.05},
    **{"sampling/sampling_logp_difference/mean": 0.004, "sampling/surprise": 0.7, "engine/cache_demand": 1.9},
    **{"correction/masked_episodes/q1": 0.0, "correction/masked_episodes/q4": 0.01},
    **{"correction/ess/q1": 0.99, "correction/ess/q4": 0.95, "infrastructure/failed_episodes": 0.0},
}


def run(n: int = 12, **changes: float | list[float] | None) -> list[Log]:
    """Logs of a healthy run, with some metrics changed: to a value, or to one for each log; None: it is missing."""
    logs: list[Log] = []
    for number in range(n):
        own = {name: value[number] if isinstance(value, list) else value for name, value in changes.items()}
        whole = {**HEALTHY, **own, "step": float(number + 1)}
        logs.append({name: value for name, value in whole.items() if value is not None})
    return logs


def test_calls_of_many_tools_are_counted_where_a_log_is_of_several_steps() -> None:
    """Tools that were not called in a step have no number there, and TRL averages those that are there."""
    changes: dict[str, Any] = {"tools/called": 10.0, "tools/add/calls": 6.0, "tools/multiply/calls": 9.0}
    assert Logs(run(3, **changes)).calls == 30.0


NO_CALLS = {
    **{f"tools/{tool}/{what}": 0.0 for tool in ("add", "multiply") for what in ("calls", "failures")},
    **{"tools/call_frequency": 0.0, "tools/error/invalid_json": 0.0, "tools/error/raised": 0.0},
}
DEAD = {"reward/groups_without_spread": 1.0}
UNPAID = {"rewards/mine/looks_for_marker": 1.0, "rewards/mine/mean": 0.0, "rewards/mine/std": 0.0}
FALLING = [0.8, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.1, 0.06, 0.05, 0.05, 0.04]
RISING = [0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6]
SWAYING = [0.3, 0.23, 0.23, 0.31, 0.38, 0.12, 0.33, 0.19, 0.5, 0.31, 0.2, 0.55]  # of a model that gave chains up
GIVEN_UP = [1.9, 1.9, 1.9, 1.8, 1.7, 1.5, 1.3, 1.2, 1.0, 1.0, 0.9, 0.9]

# rule: what is changed of a healthy run, and the facts that its sentence holds
TROUBLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "infrastructure_fails": (
        {"infrastructure/failed_episodes": 0.4, "stop/engine_failure": 0.3, "tools/error/timeout": 12.0},
        ["40 %", "30 % lost by the engine, 12 tool calls timed out", "0.1 s"],
    ),
    "no_tool_calls": (
        {**NO_CALLS, "answers/like_calls/fenced_json": 50.0, "answers/like_calls/python": 3.0},
        ["0.00 calls per episode", "53 turns", "code fence (50)", "Python (3)", "steps 10 to 12"],
    ),
    "reward_reads_markers": (UNPAID, ["reward mine", "steps 10 to 12", "`tool_calls`"]),
    "groups_all_failed": (
        {**DEAD, "success": 0.0, "stop/length": 0.4, "stop/length_of_turn": 0.4},
        ["success 0.00", "nothing is learned", "40 % of the episodes are cut", "max_turn_tokens"],
    ),
    "groups_all_solved": ({**DEAD, "success": 0.98}, ["no group differs", "success 0.98"]),
    "groups_all_alike": ({"reward/groups_without_spread": 0.95, "success": 0.5}, ["95 % of the groups", "0.50"]),
    "broken_calls": (
        {"tools/error/unclosed": 14.0, "tools/error/invalid_json": 30.0, "tools/error/bad_arguments": 20.0},
        ["67 %", "(invalid_json 31 %, bad_arguments 21 %, unclosed 15 %)", "steps 10 to 12", "`toolgrpo sft`"],
    ),
    "cut_by_length": (
        {"stop/length": 0.5, "stop/length_of_turn": 0.1, "stop/context_full": 0.2},
        ["70 %", "40 % by max_completion_length", "20 % by the context window", "10 % by max_turn_tokens"],
    ),
    "tool_fails": ({"tools/multiply/failures": 30.0}, ["multiply", "83 %", "raised 5"]),
    "engine_differs": ({"sampling/sampling_logp_difference/mean": 0.05}, ["0.050"]),
    "engine_draws_oddly": ({"sampling/surprise": 12.3}, ["12.3 nats per token in steps 10 to 12", "where 0.6 would"]),
    "cache_is_small": ({"engine/cache_demand": 4.4}, ["4.4 times", "--vllm_gpu_memory_utilization"]),
    "lengths_weighted_unlike": (
        {"correction/masked_episodes/q4": 0.4, "correction/masked_episodes/q1": 0.02},
        ["40 % of the longest quarter", "2 % of the shortest", "rollout_correction"],
    ),
    "void_turns": ({"turns/void": 0.3}, ["30 %"]),
    "copied_results": ({"answers/copied_result": 0.6}, ["60 %"]),
    "entropy_collapses": ({"entropy": FALLING}, ["from 0.7 to 0.0467"]),
    "tool_never_used": ({"tools/multiply/calls": 0.0, "tools/multiply/failures": 0.0}, ["multiply", "60 calls"]),
    "calls_given_up": (
        {"tools/call_frequency": GIVEN_UP, "success": SWAYING},
        ["has 0.93 of them, down from 1.80", "steps 3 to 12", "0.31 to 0.35"],
    ),
    "reward_without_success": ({"reward": RISING, "success": 0.1}, ["from 0.17 to 0.60", "0.10 to 0.10"]),
}


def spoken(logs: Sequence[Log]) -> dict[str, str]:
    return {finding.rule: finding.sentence for finding in findings(logs)}


def test_every_rule_has_its_trouble_and_none_speaks_of_a_healthy_run() -> None:
    assert list(TROUBLES) == [rule.name for rule in RULES]
    assert spoken(run()) == {}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_rule_speaks_with_its_numbers_once_it_has_the_logs_and_the_metrics_that_it_needs(name: str) -> None:
    changes, words = TROUBLES[name]
    (rule,) = (rule for rule in RULES if rule.name == name)
    logs = run(**changes)
    said = spoken(logs)[name]
    assert all(word in said for word in words), said
    assert "\n" not in said and not said.endswith(".")
    assert name not in spoken(logs[: rule.logs - 1])
    assert not list(rule.look(Logs([{"reward": 0.0, "step": 1.0}] * rule.logs))), "the metrics are missing"


SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "calls_given_up": (4, {"tools/call_frequency": GIVEN_UP, "success": SWAYING}),
    "reward_without_success": (16, {"reward": RISING, "success": 0.1}),
    "entropy_collapses": (4, {"entropy": FALLING}),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_trend_is_seen_however_slow_it_is(name: str) -> None:
    """What takes a hundred steps changes little within ten."""
    pace, changes = SLOW[name]
    slow = {
        key: [one for one in each for _ in range(pace)] if isinstance(each, list) else each
        for key, each in changes.items()
    }
    assert name in {finding.rule for finding in over_run(run(12 * pace, **slow))}


def test_chance_gives_no_calls_up() -> None:
    """Thirty-two episodes a step, of which each calls nothing, once or three times, and whose success sways too."""
    drawn = random.Random(0)
    frequencies = [statistics.mean(drawn.choice((0, 0, 1, 3)) for _ in range(32)) for _ in range(1000)]
    successes = [statistics.mean(drawn.random() < 0.5 for _ in range(32)) for _ in range(1000)]
    assert list(over_run(run(1000, **{"tools/call_frequency": frequencies, "success": successes}))) == []


NO_TOOLS: dict[str, Any] = {name: None for name in HEALTHY if name.startswith(("tools/add", "tools/multiply"))}
NEARLY: dict[str, tuple[str, dict[str, Any]]] = {
    "all lengths alike": ("lengths_weighted_unlike", {f"correction/ess/q{q}": 0.4 for q in (1, 4)}),
    "no tool is offered": ("no_tool_calls", {**NO_TOOLS, "tools/call_frequency": 0.0}),
    "a few calls are enough": ("no_tool_calls", {**NO_CALLS, "tools/add/calls": 5.0}),
    "calls of the last turn are not run": ("no_tool_calls", {**NO_CALLS, "stop/max_turns": 1.0}),
    "calls without markers that were run": ("no_tool_calls", {"tools/unmarked": 110.0}),
    "its scores differ": ("reward_reads_markers", {**UNPAID, "rewards/mine/std": 0.1}),
    "there are no calls to look for": ("reward_reads_markers", {**NO_CALLS, **UNPAID}),
    "one live step in three": (
        "groups_all_failed",
        {"reward/groups_without_spread": [1.0] * 10 + [0.2, 1.0], "success": 0.0, "reward_std": 0.0},
    ),
    "a solved run needs no entropy": ("entropy_collapses", {"entropy": FALLING, "success": 0.95}),
    "fewer calls do as well": ("calls_given_up", {"tools/call_frequency": GIVEN_UP, "success": RISING}),
    "a model that knows nothing": ("engine_draws_oddly", {"sampling/surprise": 11.9, "entropy": 11.9}),
    "success rises too": ("reward_without_success", {"reward": RISING, "success": RISING}),
    **{
        what: ("tool_fails", {f"tools/{tool}/calls": n, f"tools/{tool}/failures": n})
        for what, tool, n in (
            ("few calls at all", "multiply", 2.0),
            ("calls that cannot be read are no tool", "unnamed", 30.0),
            ("a tool that there is not cannot fail", "unknown", 30.0),
        )
    },
    "several causes": ("broken_calls", {"tools/error/unclosed": 18.0, "tools/error/invalid_json": 18.0}),
}


@pytest.mark.parametrize("case", NEARLY)
def test_what_only_looks_like_trouble_is_passed_over(case: str) -> None:
    name, changes = NEARLY[case]
    assert name not in spoken(run(**changes))


def test_one_cause_is_one_sentence_and_broken_calls_are_told_before_the_episodes_that_they_fill() -> None:
    told = list(spoken(run(**TROUBLES["broken_calls"][0], **TROUBLES["cut_by_length"][0])))
    assert told == ["broken_calls", "cut_by_length"]
    shown = {**TROUBLES["broken_calls"][0], **TROUBLES["tool_fails"][0], **TROUBLES["void_turns"][0]}
    assert list(spoken(run(**shown))) == ["broken_calls"]
    assert list(spoken(run(**{**shown, "tools/error/raised": 50.0}))) == ["broken_calls", "tool_fails"]


@pytest.mark.parametrize(
    "cause",
    ["infrastructure_fails", "no_tool_calls", "reward_reads_markers", "broken_calls", "cut_by_length", "tool_fails"],
)
def test_a_cause_says_itself_that_nothing_is_learned(cause: str) -> None:
    alone, both = (spoken(run(**{**TROUBLES[cause][0], **more})) for more in ({}, {**DEAD, "success": 0.0}))
    (first, *_) = both
    assert first == cause and "groups_all_failed" not in both
    assert both[cause].startswith(alone[cause]) and both[cause].endswith("(success 0.00), so nothing is learned")


def test_at_the_end_a_run_of_two_steps_is_judged_by_what_there_is() -> None:
    short = run(2, **DEAD, success=0.0)
    assert findings(short) == [] and [one.rule for one in findings(short, at_end=True)] == ["groups_all_failed"]
    assert findings([], at_end=True) == []


def test_a_run_that_is_over_is_asked_at_each_of_its_logs() -> None:
    logs = run(8, success=0.0, **{"reward/groups_without_spread": [1.0] * 5 + [0.2] * 3})
    evaluation = {"eval_reward": 0.1, "step": 4.0}
    found = over_run(iter([*logs[:4], evaluation, *logs[4:]]))
    assert [(one.rule, one.step) for one in found] == [("groups_all_failed", step) for step in (3, 4, 5)]
    assert list(over_run([])) == []


def test_every_rule_points_to_a_section_that_is_there() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / TROUBLESHOOTING).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {rule.section for rule in RULES} <= anchors


# Turns that look like calls in a form that is not the model's own, which it tells of.

WRITTEN = {
    "markers": '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "fenced_json": 'I will add.\n```json\n{"name": "add", "arguments": {"a": 1}}\n```',
    "json": 'Sure: {"name": "add", "parameters": {"a": 1, "b": 2}}',
    "react": "Thought: add them\nAction: add\nAction Input: 1, 2",
    "python": "result = add(1, 2)",
}


def test_each_form_is_told_and_a_long_turn_costs_no_more_than_its_beginning() -> None:
    assert [lookalike_form(text, ["add"]) for text in WRITTEN.values()] == list(WRITTEN) == list(FORMS)
    assert lookalike_form('{"name": "' * 200_000 + WRITTEN["markers"], ["add"]) is None


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 3.",
        'The object {"name": "Ada"} has a name.',
        "You could add(1, 2) them in your head.",
        "added(1, 2)",
        "```python\nprint(3)\n```",
        "Action: none is needed.",
    ],
)
def test_answers_are_no_calls(text: str) -> None:
    assert lookalike_form(text, ["add"]) is None


def episode(*turns: tuple[str, tuple[CallAttempt, ...]]) -> Trajectory:
    ledger = Ledger([1])
    for text, attempts in turns:
        ledger.turn(Turn(start=0, end=0, content=text, reasoning=None, attempts=attempts))
    return ledger.finish(StopReason.FINISHED)


def test_turns_that_hold_a_call_are_not_counted() -> None:
    unmarked = CallAttempt(AttemptStatus.UNMARKED, "{}", "add", {})
    json_turns = episode((WRITTEN["json"], ()), (WRITTEN["json"], (unmarked,)), (WRITTEN["json"], (attempt("add"),)))
    others = episode((WRITTEN["python"], ()), ("It is 3.", ()))
    assert count_lookalikes([json_turns, others], ["add"]) == {"json": 2, "python": 1}
