"""Player of episodes in place of our own loop: an agent of the user's, behind the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from toolgrpo.trajectory import Trajectory

if TYPE_CHECKING:
    from toolgrpo.rollout.runner import Episode, EpisodeRunner


class Player(Protocol):
    """Plays over the same engine, format and limits; each episode yields exactly one trajectory."""

    async def play(self, episode: Episode, shared: EpisodeRunner) -> Trajectory:
        """Play one episode to its end, whatever comes."""
        ...

    def close(self) -> None: ...
