"""Rewards by turn that need no model: what they say of each turn of an episode.

    call_ok      what the turn changed in the share of the episode's calls that came back well
    gold_call    1/n for each of the n gold calls of the row that the turn was the first to make, name and arguments
    environment  what the environment's `step_reward()` gave after the turn

Neither of the first two pays for one more turn as such: over an episode they add up to the share of
its calls that came back well, and to the share of the gold calls that it made, at most 1 however
long it is. (A number for every good call would pay for calls without end, and one taken off for every
bad call for not calling at all: in a group without a success nothing else is left to learn from.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolgrpo.calls import RUNNABLE
from toolgrpo.errors import RewardError
from toolgrpo.rewards.gold_calls import listed_calls, made_calls
from toolgrpo.trajectory import Trajectory, Turn

__all__ = ["BUILT_IN_TURN_REWARDS", "call_ok", "environment", "gold_call"]


def call_ok(trajectories: Sequence[Trajectory], **_: Any) -> list[list[float]]:
    """Pay what each turn changed in the share of calls that were well formed and came back without an error."""
    return [_changes_of_share(one) for one in trajectories]


def _changes_of_share(trajectory: Trajectory) -> list[float]:
    good = made = 0
    share, changes = 0.0, []
    for turn in trajectory.turns:
        made += len(turn.attempts)
        good += _n_good(turn)
        now = good / made if made else 0.0
        changes.append(now - share)
        share = now
    return changes


def _n_good(turn: Turn) -> int:
    return sum(
        attempt.status in RUNNABLE and result.ok for attempt, result in zip(turn.attempts, turn.results, strict=False)
    )


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


BUILT_IN_TURN_REWARDS: dict[str, Callable[..., list[list[float]]]] = {
    "call_ok": call_ok,
    "gold_call": gold_call,
    "environment": environment,
}
