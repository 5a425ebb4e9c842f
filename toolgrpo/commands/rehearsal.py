"""A dry run's rehearsal: each environment is reset once, and each reward asked once in the way in
which measurements ask it.

Rewards get three made-up episodes: one answers as the row does, one says nothing, one has called a
tool that does not exist. A model writes all three in its first steps, so a reward that raises on
them would end a run.

Not covered: what a reward gives (a wrong number is no error); reward models.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from datasets import Dataset

from toolgrpo.calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.evaluation.grading import Grader, grade
from toolgrpo.ledger import Ledger
from toolgrpo.rollout import RolloutBatch, Scored
from toolgrpo.rollout.row_tools import offered_tools
from toolgrpo.tools.base import ToolProvider
from toolgrpo.trajectory import Message, StopReason, Trajectory, Turn

_ROWS = 3


def rehearse(
    rows: Dataset,
    tools: ToolProvider | None,
    rewards: Sequence[Grader],
    weights: Sequence[float] | None = None,
    *,
    by_agent: bool = False,
) -> None:
    """Open the tools of one episode and close them; then ask each reward about made-up episodes.

    Those of an agent bring a reward, as it would return one.

    Raises what they would raise in a training, or after it.
    """
    chosen = list(islice(iter(rows), _ROWS))
    given = 0.0 if by_agent else asyncio.run(_opened(offered_tools(tools, chosen[0]), chosen[0]))
    chosen = (chosen * _ROWS)[:_ROWS]  # a list of one is no test of lengths
    made = zip(chosen, (_answered, _silent, _failed_call), strict=True)
    episodes = tuple(Scored(row, replace(make(row), reward=given)) for row, make in made)
    grade(RolloutBatch(episodes=episodes, mode="heldout"), rewards, weights, threshold=1.0)


async def _opened(tools: ToolProvider | None, row: Mapping[str, Any]) -> float | None:
    """Open one episode's tools, which resets an environment, and return the reward it gives then."""
    if tools is None:
        return None
    async with tools.session(row) as session:
        return await session.reward()


def _answered(row: Mapping[str, Any]) -> Trajectory:
    text = str(row.get("answer", "an answer"))
    return _episode([{"role": "assistant", "content": text}], Turn(0, 1, text, None))


def _silent(row: Mapping[str, Any]) -> Trajectory:
    return _episode([{"role": "assistant", "content": ""}], Turn(0, 1, "", None))


def _failed_call(row: Mapping[str, Any]) -> Trajectory:
    name, arguments, error = "no_such_tool", {"a": 1}, "Error: there is no tool named 'no_such_tool'"
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turn = Turn(
        0,
        1,
        "",
        None,
        attempts=(CallAttempt(AttemptStatus.OK, json.dumps({"name": name, "arguments": arguments}), name, arguments),),
        results=(ToolResult(error, name, ToolErrorKind.UNKNOWN_TOOL),),
    )
    return _episode(
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": error},
        ],
        turn,
    )


def _episode(messages: Sequence[Message], turn: Turn) -> Trajectory:
    ledger = Ledger([0])
    ledger.sampled([0], [0.0])
    ledger.say(*messages)
    ledger.turn(turn)
    return ledger.finish(StopReason.FINISHED)
