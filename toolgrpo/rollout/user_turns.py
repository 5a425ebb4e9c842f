"""Source of the user's messages in the middle of an episode: a row's own script, or its environment.

A row whose column `user_turns` lists texts has the user say them one after the other, each when the
model has answered the one before: when it ends a turn without a call. An environment with
`next_user_message` is asked then instead. Neither of them: the first answer ends the episode.

Invariant: an episode has one speaker. Where a row has a script and its environment speaks too, that
is an error, because each would take the other's messages for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolgrpo.errors import DataError
from toolgrpo.tools.base import ToolProvider, ToolSession, speaks
from toolgrpo.trajectory import StopReason


class User:
    """The user of one episode. `said` counts what the user said after the prompt."""

    def __init__(self, script: tuple[str, ...] | None, most: int | None) -> None:
        self._script = script  # None: the environment speaks
        self._most = most
        self.said = 0

    async def reply(self, session: ToolSession | None, answer: str, *, last_turn: bool) -> str | StopReason:
        """Return what the user says to an answer, or why the episode ends with it.

        Nothing more to say is FINISHED, also where a limit would have ended it.
        """
        text = await self._next(session, answer)
        if text is None:
            return StopReason.FINISHED
        if last_turn:
            return StopReason.MAX_TURNS
        return StopReason.MAX_USER_TURNS if self._most is not None and self.said >= self._most else text

    async def _next(self, session: ToolSession | None, answer: str) -> str | None:
        if self._script is not None:
            return self._script[self.said] if self.said < len(self._script) else None
        return None if session is None else await session.next_user_message(answer)


def user_of(tools: ToolProvider | None, row: Mapping[str, Any], most: int | None = None) -> User | None:
    """Return who speaks for the user in an episode of this row, `most` times; None if nobody does."""
    script = row.get("user_turns")
    check_user_turns(tools, script)
    if script:
        return User(tuple(script), most)
    return User(None, most) if speaks(tools) else None


def check_user_turns(tools: ToolProvider | None, script: Any) -> None:
    """Raise `DataError` where a row has a script beside an environment that speaks."""
    if script and speaks(tools):
        raise DataError(
            "a row has the column `user_turns`, and the environment has next_user_message: both would speak for the user. "
            "Leave one of them out; an environment gets the row in reset, under another name of the column too."
        )


def users_speak(tools: ToolProvider | None, rows: Any) -> bool:
    """Return whether users speak in the middle of episodes of this data set."""
    return speaks(tools) or "user_turns" in (getattr(rows, "column_names", None) or ())
