"""BFCL v4's multi-turn tasks as an environment: its simulated APIs are the tools, its users speak turn by turn.

One instance an episode. The row says which task (`bfcl`), which functions its prompt shows (`tools`)
and which only come up later (`hidden_tools`): those are shown by a message of the user. As in BFCL
they run whenever they are called (a reference does so too), and arguments reach the APIs as they
were written, also where they do not fit their description.

The reward is 1 where BFCL's own checker finds the whole conversation right, else 0; an episode whose
checker fails has none, and is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC as MORE_FUNCTIONS
from bfcl_tasks import FUNCTIONS, Task, tasks
from bfcl_world import Call, World, verdict

from toolgrpo import DropEpisode
from toolgrpo.tools import tool

__all__ = ["ENVIRONMENT", "next_message"]

_SCHEMAS = {name: schema for of_class in FUNCTIONS.values() for name, schema in of_class.items()}


def next_message(task: Task, turn: int) -> str | None:
    """Return what the user says in a turn; None behind the last."""
    if turn >= len(task.questions):
        return None
    shown = [json.dumps(_SCHEMAS[name]) for name in task.missing.get(turn, ())]
    return "\n".join([*shown, MORE_FUNCTIONS if shown else task.questions[turn]])


class _Conversation:
    """One episode."""

    def reset(self, bfcl: str, **row: Any) -> None:
        self._task = tasks()[bfcl]
        self._world = World(self._task)
        self._turns: list[list[Call]] = [[]]
        self._ended = False  # by an answer to the last question

    def next_user_message(self, answer: str) -> str | None:
        message = next_message(self._task, len(self._turns))
        self._ended = message is None
        if message is not None:
            self._turns.append([])
        return message

    def reward(self) -> float:
        try:
            return float(self._ended and verdict(self._task, self._turns) is None)
        except Exception as error:  # what it compares was made by a model, with anything in it
            raise DropEpisode(
                f"BFCL's checker failed for {self._task.name}: {type(error).__name__}: {error}"
            ) from error

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        call = Call(name, arguments)
        self._turns[-1].append(call)
        result = self._world.run(call)
        if result.failed:
            raise RuntimeError(result.text)
        return result.text


def _method(name: str) -> Callable[..., str]:
    def call(self: _Conversation, **arguments: Any) -> str:
        return self._call(name, arguments)

    call.__name__ = name
    return tool(schema=_SCHEMAS[name], unchecked=True)(call)


ENVIRONMENT = type("Bfcl", (_Conversation,), {name: _method(name) for name in _SCHEMAS})
