"""What state an episode was in before each of its turns, as a key: two episodes of a group that have
the same key stood at the same place.

Without a word of an environment, the state is what the model could know: the prompt, each call so far
with its result, and what users said. Calls are compared by what they mean: names, and arguments in one order and
form; what was thought or said beside them does not count. An environment may say its state itself
(`state_key()`), and then that is the state.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from toolgrpo.trajectory import Trajectory, Turn

__all__ = ["states_of"]


def states_of(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the key of the state before each turn, 16 hexadecimal digits."""
    state = _digest(["prompt", list(trajectory.prompt_ids)])
    states = []
    for turn in trajectory.turns:
        states.append(state)
        state = _digest(["environment", turn.state]) if turn.state is not None else _digest([state, _seen(turn)])
    return tuple(states)


def _seen(turn: Turn) -> list[Any]:
    """Return the calls of a turn with their results; of one that cannot be read, what was written.

    And what the user said to it, if anything.
    """
    calls = [[one.name, one.arguments if one.arguments is not None else one.raw] for one in turn.attempts]
    heard = [] if turn.user is None else [turn.user]
    return [calls, [result.content for result in turn.results], *heard]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
