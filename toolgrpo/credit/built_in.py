"""Rewards by turn that need no model: what they say of each turn of an episode.

    call_ok      0 for a turn whose calls all came back well, or that made none; else minus the share that did not
    gold_call    1/n for each of the n gold calls of the row that the turn was the first to make, name and arguments
    environment  what the environment's `step_reward()` gave after the turn

None of them pays for one more turn as such: `call_ok` only takes, and `gold_call` pays for a gold
call once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolgrpo.errors import RewardError
from toolgrpo.rewards.gold_calls import listed_calls, made_calls
from toolgrpo.trajectory import AttemptStatus, Trajectory, Turn

__all__ = ["BUILT_IN_TURN_REWARDS", "call_ok", "environment", "gold_call"]


def call_ok(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
    """Take off the share of a turn's calls that were malformed, refused, failed or not answered."""
    return [[_share_failed(turn) for turn in one.turns] for one in trajectories]


def _share_failed(turn: Turn) -> float:
    if not turn.attempts:
        return 0.0
    good = sum(
        attempt.status in (AttemptStatus.OK, AttemptStatus.UNMARKED) and result.ok
        for attempt, result in zip(turn.attempts, turn.results, strict=False)
    )
    return good / len(turn.attempts) - 1.0


def gold_call(trajectories: Sequence[Trajectory], gold_calls: Sequence[Any], **_: Any) -> list[list[float]]:
    """Pay for each gold call of the row once, in the turn that makes it first; a row without any pays nothing."""
    found = []
    for row, (trajectory, gold) in enumerate(zip(trajectories, gold_calls, strict=True)):
        wanted = [] if gold is None else listed_calls(gold, row)
        n = len(wanted)
        of_turns = []
        for turn in trajectory.turns:
            hits = 0
            for call in made_calls(turn.attempts):
                if call in wanted:
                    wanted.remove(call)
                    hits += 1
            of_turns.append(hits / n if n else 0.0)
        found.append(of_turns)
    return found


def environment(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
    """Return what each episode's environment gave after each turn with calls; other turns have 0."""
    return [
        [_given(turn, place, number) for place, turn in enumerate(one.turns)] for number, one in enumerate(trajectories)
    ]


def _given(turn: Turn, place: int, episode: int) -> float:
    if turn.reward is None and turn.results:
        raise RewardError(
            f"the turn reward `environment` has nothing for turn {place + 1} of episode {episode}: its environment gives "
            f"no reward by step. Use --environment with a class that has `step_reward()`, or another --turn_reward"
        )
    return turn.reward or 0.0


BUILT_IN_TURN_REWARDS = {"call_ok": call_ok, "gold_call": gold_call, "environment": environment}
