"""Games of TextArena for one player as an environment that speaks: each answer of the model is its move.

A row's column `textarena` names the game (`GuessTheNumber-v0`), `seed` its start. What the game says
at the beginning follows the prompt, and what it says to a move is what the user replies. The reward is
the game's own (0 to 1 in most), and 0 for a game that was not played to its end.
"""

from __future__ import annotations

from typing import Any

import textarena

__all__ = ["ENVIRONMENT"]


class TextArena:
    """One game."""

    def reset(self, textarena: str, seed: int | None = None, **row: Any) -> str:
        self._game, self._over = _started(textarena, seed), False
        return f"\n\n{self._heard()}"

    def next_user_message(self, answer: str) -> str | None:
        self._over, _ = self._game.step(action=answer)
        return None if self._over else self._heard()

    def reward(self) -> float:
        if not self._over:
            return 0.0
        rewards, _ = self._game.close()
        return float(rewards[0])

    def _heard(self) -> str:
        """Return what the game has said since it was last asked; the player's own moves are not repeated."""
        _, said = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in said if kind is not own).strip() or "Go on."


def _started(name: str, seed: int | None) -> Any:
    game = textarena.make(f"{name}-raw")  # without wrappers, which repeat the whole history each time
    game.reset(num_players=1, seed=seed)
    if not isinstance(game.state, textarena.SinglePlayerState):
        raise ValueError(f"{name} is a game for several players; give one for a single player")
    return game


ENVIRONMENT = TextArena
