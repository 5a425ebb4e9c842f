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
from dataclasses import asdict, dataclass
from typing import Any

from toolgrpo.calls import READABLE, AttemptStatus, Call, ToolErrorKind
from toolgrpo.rewards.episode_reading import calls
from toolgrpo.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The parts of one episode's score."""

    format: float
    tool: float
    arguments: float
    economy: float

    @property
    def score(self) -> float:
        return (self.format + self.tool + self.arguments + self.economy) / 4


def tool_use(
    completions: Sequence[Any],
    trajectories: Sequence[Trajectory],
    expected_tools: Sequence[Sequence[str] | None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    expected = expected_tools if expected_tools is not None else [None] * len(trajectories)
    uses = [_parts(trajectory, wanted) for trajectory, wanted in zip(trajectories, expected, strict=True)]
    if log_metric is not None and uses:
        for part in asdict(uses[0]):
            log_metric(f"tool_use/{part}", sum(getattr(use, part) for use in uses) / len(uses))
    return [use.score for use in uses]


def _parts(trajectory: Trajectory, expected: Sequence[str] | None) -> ToolUse:
    """Return the four parts of one episode's score."""
    made = calls(trajectory)
    if expected is not None and not expected:
        return ToolUse(0.0, 0.0, 0.0, 0.0) if made else ToolUse(1.0, 1.0, 1.0, 1.0)
    if not made:
        return ToolUse(0.0, 0.0, 0.0, 0.0)
    readable = [call for call in made if call.status in READABLE]
    return ToolUse(
        format=len(readable) / len(made),
        tool=_tool(made, expected),
        arguments=_share(
            readable, lambda call: not _has(call, AttemptStatus.BAD_ARGUMENTS, ToolErrorKind.BAD_ARGUMENTS)
        ),
        economy=_economy(trajectory, made),
    )


def _tool(made: Sequence[Call], expected: Sequence[str] | None) -> float:
    if expected is None:
        return _share(
            made,
            lambda call: (
                call.name is not None and not _has(call, AttemptStatus.UNKNOWN_TOOL, ToolErrorKind.UNKNOWN_TOOL)
            ),
        )
    called, wanted = {call.name for call in made}, set(expected)
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
