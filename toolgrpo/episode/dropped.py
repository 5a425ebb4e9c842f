"""Episodes that cannot be scored: `raise DropEpisode(reason)`, and what becomes of it.

A dropped episode is neither a success nor a failure. It leaves the mean, the standard deviation and
the loss of its group, and is counted by its cause. Standard library only: plugin files import this
in tool workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class DropCause(StrEnum):
    """Part of a run that could not score an episode."""

    NO_REWARD = "no_reward"  # every reward function gave None
    REWARD = "reward"  # a reward function dropped it
    TOOL = "tool"  # a tool dropped it
    ENVIRONMENT = "environment"  # an environment dropped it, in reset, a method or its reward
    NO_ROOM = "no_room"  # its prompt, with an environment's first observation, leaves no room for a token
    AGENT = "agent"  # the agent that played it failed, or dropped it
    ENDPOINT = "endpoint"  # the chat endpoint that played it failed, after retries
    ENVIRONMENT_LOST = "environment_lost"  # an environment that hung, died or met `episode_timeout`


@dataclass(frozen=True, slots=True)
class Drop:
    """Why one episode is not scored."""

    cause: DropCause
    reason: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.reason}"


_REASONS_SHOWN, _LONGEST_REASON = 3, 200


def reasons_of(drops: Sequence[Drop]) -> str:
    """Return why these episodes were dropped, the most frequent reasons first."""
    reasons = Counter(f"{drop.cause}: {_short(drop.reason)}" for drop in drops).most_common()
    told = "; ".join(f"{count} x {reason}" for reason, count in reasons[:_REASONS_SHOWN])
    return told + (f"; and {len(reasons) - _REASONS_SHOWN} other reasons" if len(reasons) > _REASONS_SHOWN else "")


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."


class DropEpisode(Exception):
    """Raise this in a tool, an environment or a reward whose episode cannot be scored.

    In a reward function it may also stand in the returned list, in place of a number.
    """

    cause: DropCause | None = None  # None: that of the place where it is raised

    def __init__(self, reason: str = "no reason was given") -> None:
        super().__init__(reason)
        self.reason = str(reason)

    def at(self, cause: DropCause) -> Drop:
        """Return the drop that this is where it was raised."""
        return Drop(self.cause or cause, self.reason)


class EnvironmentLost(DropEpisode):
    """The environment that was to score an episode is gone."""

    cause = DropCause.ENVIRONMENT_LOST


class EndpointLost(DropEpisode):
    """The chat endpoint that was to play an episode failed."""

    cause = DropCause.ENDPOINT
