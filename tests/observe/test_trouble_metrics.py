"""A few tools have metrics each, in every batch; of a large catalogue those that were called."""

from __future__ import annotations

from toolgrpo.calls import ToolErrorKind, ToolResult
from toolgrpo.ledger import Ledger
from toolgrpo.observe.doctor import findings
from toolgrpo.observe.metrics import EACH_TOOL, merged, tool_metrics, trouble_metrics
from toolgrpo.rollout import EpisodeLimits
from toolgrpo.trajectory import StopReason, Turn

LIMITS = EpisodeLimits(max_completion_length=9)
CALLED = ToolResult("3", "tool0")
MADE_UP = ToolResult("?", "no_such_tool", ToolErrorKind.UNKNOWN_TOOL)


def metrics(n_tools: int, *results: ToolResult) -> dict[str, float]:
    """What is logged of one episode with these results."""
    ledger = Ledger([1])
    ledger.sampled([5], [-1.0])
    ledger.turn(Turn(start=0, end=1, content="", reasoning=None, results=results))
    tools = [f"tool{number}" for number in range(n_tools)]
    trouble = trouble_metrics([ledger.finish(StopReason.FINISHED)], tools, LIMITS)
    return merged([{**tool_metrics(results, 1), **trouble}])


def by_tool(logged: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logged.items() if name.startswith("tools/") and name.endswith("/calls")}


def test_each_of_a_few_tools_is_there_called_or_not() -> None:
    logged = by_tool(metrics(EACH_TOOL, CALLED))
    assert len(logged) == EACH_TOOL and sum(logged.values()) == 1


def test_of_a_large_catalogue_only_what_was_called_is_there() -> None:
    assert by_tool(metrics(400, CALLED)) == {"tools/tool0/calls": 1, "tools/unknown/calls": 0}
    assert by_tool(metrics(400, CALLED, MADE_UP)) == {"tools/tool0/calls": 1, "tools/unknown/calls": 1}


def test_the_doctor_hears_of_a_large_catalogue_that_nobody_calls() -> None:
    logs = [
        {**metrics(400), "step": step, "reward": 0.0, "rollout/sampled_tokens": 640.0, "completions/mean_length": 10.0}
        for step in range(1, 21)
    ]
    found = {one.rule for one in findings(logs)}
    assert "no_tool_calls" in found and "tool_never_used" not in found


def test_the_doctor_does_not_list_a_large_catalogue() -> None:
    logs = [{**metrics(400, *[CALLED] * 60), "step": step, "reward": 0.5} for step in range(1, 21)]
    assert "tool_never_used" not in {one.rule for one in findings(logs)}
