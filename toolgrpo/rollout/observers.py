"""`Observer`: what hears of a rollout. The recording, the tables, the metrics and the progress bar
are observers, and so is whatever a user passes as `ToolGRPOTrainer(..., observers=[...])`.

    rollout_began    some episodes begin
    turn_done        one of them has had a turn of the model, and the answers of its tools
    episode_done     one of them has ended
    rollout_ended    all of them have ended, or the rollout failed: always follows `rollout_began`
    batch_done       they were graded: once per rollout whose rewards were asked for
    close            the run is over

Invariants: observers hear in this order, each process of its own episodes; they never steer: what
they return is not looked at, and events are frozen. An observer of a user that raises is a
`PluginError` that says which, and ends the run; errors of this package's own tree keep their class.

They are called between two turns of some episode, on the event loop: what takes long delays all
episodes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolgrpo.episode.trajectory import Trajectory, Turn
from toolgrpo.errors import ConfigError, PluginError, ToolGRPOError
from toolgrpo.rollout.batch import Mode, RolloutBatch, Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutBegan:
    """So many episodes of this process begin."""

    n_episodes: int
    step: int
    mode: Mode
    label: str  # what a person is shown


@dataclass(frozen=True, slots=True)
class TurnDone:
    """An episode has had a turn; `number` is its place in the rollout."""

    rollout: RolloutBegan
    number: int
    row: Row
    turn: Turn


@dataclass(frozen=True, slots=True)
class EpisodeDone:
    """An episode has ended; `number` is its place in the rollout."""

    rollout: RolloutBegan
    number: int
    row: Row
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    """No episode runs any more; `failure` says why the rollout failed, if it did."""

    rollout: RolloutBegan
    failure: str | None = None


class Observer:
    """The protocol and its no-op base: override what you want to hear of."""

    def rollout_began(self, event: RolloutBegan) -> None:
        """Hear that episodes begin."""

    def turn_done(self, event: TurnDone) -> None:
        """Hear that an episode has had a turn."""

    def episode_done(self, event: EpisodeDone) -> None:
        """Hear that an episode has ended."""

    def rollout_ended(self, event: RolloutEnded) -> None:
        """Hear that no episode runs any more."""

    def batch_done(self, batch: RolloutBatch) -> None:
        """Hear what the episodes of a rollout were worth."""

    def close(self) -> None:
        """Hear that the run is over."""


class Observers(Observer):
    """Several observers as one: each event goes to those that listen to it, in their order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        for observer in observers:
            if not isinstance(observer, Observer):
                raise ConfigError(
                    f"an observer must be an instance of a subclass of toolgrpo.rollout.Observer, not "
                    f"{observer!r}; derive its class from it and override the methods that you need"
                )
        self._listeners = {
            event: [one for one in observers if getattr(type(one), event) is not getattr(Observer, event)]
            for event in ("rollout_began", "turn_done", "episode_done", "rollout_ended", "batch_done", "close")
        }

    @property
    def hear_turns(self) -> bool:
        """Return whether anybody listens to single turns."""
        return bool(self._listeners["turn_done"])

    def rollout_began(self, event: RolloutBegan) -> None:
        self._tell("rollout_began", event)

    def turn_done(self, event: TurnDone) -> None:
        self._tell("turn_done", event)

    def episode_done(self, event: EpisodeDone) -> None:
        self._tell("episode_done", event)

    def rollout_ended(self, event: RolloutEnded) -> None:
        """Tell all of them, also of a failure, whose error is the one to raise."""
        if event.failure is None:
            self._tell("rollout_ended", event)
            return
        for listener in self._listeners["rollout_ended"]:
            try:
                _call(listener, "rollout_ended", event)
            except ToolGRPOError:
                logger.warning("an observer failed after the rollout had failed", exc_info=True)

    def batch_done(self, batch: RolloutBatch) -> None:
        self._tell("batch_done", batch)

    def close(self) -> None:
        """Close all of them, and then raise what the first one raised."""
        failures: list[ToolGRPOError] = []
        for listener in self._listeners["close"]:
            try:
                _call(listener, "close")
            except ToolGRPOError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _tell(self, event: str, *value: Any) -> None:
        for listener in self._listeners[event]:
            _call(listener, event, *value)


def _call(observer: Observer, event: str, *value: Any) -> None:
    try:
        getattr(observer, event)(*value)
    except ToolGRPOError:
        raise
    except Exception as error:  # a plugin may raise anything; it must not look like ours
        raise PluginError(
            f"the observer {type(observer).__module__}.{type(observer).__qualname__} raised in {event}: "
            f"{type(error).__name__}: {error}. Fix it, or leave it out of `observers`."
        ) from error
