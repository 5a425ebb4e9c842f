"""`tool_use`: how well tools were used, whatever the answer; a shaping reward to add to one for the
answer.

The mean of four parts, each from 0 to 1 and each logged as `tool_use/PART`:

    format     share of call attempts that could be read
    tool       with a column `expected_tools`: how far the tools called are those expected (intersection over union);
               without: share of attempts that name a tool there is
    arguments  share of readable calls whose arguments fit the tool
    economy    share of turns and calls that are neither empty nor a repetition

Without any call the reward is 0.0, except where `expected_tools` is an empty list: then it is 1.0,
and 0.0 for a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from toolgrpo.episode.tool_calls import READABLE, AttemptStatus, Call, ToolErrorKind
from toolgrpo.episode.trajectory import Trajectory

_PARTS = ("format", "tool", "arguments", "economy")


def tool_use(
    completions: Sequence[Any],
    trajectories: Sequence[Trajectory],
    expected_tools: Sequence[Sequence[str] | None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    expected = expected_tools if expected_tools is not None else [None] * len(trajectories)
    uses = [_parts(trajectory, wanted) for trajectory, wanted in zip(trajectories, expected, strict=True)]
    for name, values in zip(_PARTS, zip(*uses, strict=True), strict=False):
        if log_metric is not None:
            log_metric(f"tool_use/{name}", sum(values) / len(values))
    return [sum(use) / len(use) for use in uses]


def _parts(trajectory: Trajectory, expected: Sequence[str] | None) -> tuple[float, float, float, float]:
    """Return the four parts of one episode's score."""
    made = trajectory.calls
    if expected is not None and not expected:  # no call is wanted
        return (float(not made),) * 4
    if not made:
        return (0.0,) * 4
    readable = [call for call in made if call.status in READABLE]
    bad = (AttemptStatus.BAD_ARGUMENTS, ToolErrorKind.BAD_ARGUMENTS)
    fitting = _share(readable, lambda call: not _has(call, *bad))
    return len(readable) / len(made), _tool(made, expected), fitting, _economy(trajectory, made)


def _tool(made: Sequence[Call], expected: Sequence[str] | None) -> float:
    if expected is None:
        return _share(
            made,
            lambda call: (
                call.name is not None and not _has(call, AttemptStatus.UNKNOWN_TOOL, ToolErrorKind.UNKNOWN_TOOL)
            ),
        )
    called, wanted = {call.name for call in made}, {expected} if isinstance(expected, str) else set(expected)
    return len(called & wanted) / len(called | wanted)


def _economy(trajectory: Trajectory, made: Sequence[Call]) -> float:
    empty = sum(not turn.content.strip() and not turn.attempts and not turn.reasoning for turn in trajectory.turns)
    different = {(call.name, json.dumps(dict(call.arguments), sort_keys=True, default=str)) for call in made}
    repeated = len(made) - len(different)
    return 1.0 - (empty + repeated) / (empty + len(made))


def _has(call: Call, status: AttemptStatus, error: ToolErrorKind) -> bool:
    return call.status is status or call.error is error


def _share(items: Sequence[Call], condition: Callable[[Call], bool]) -> float:
    return sum(map(condition, items)) / len(items) if items else 0.0
