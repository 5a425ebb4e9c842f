"""What the rollout asks of tools: names, schemas, and sessions that answer call attempts.

A session belongs to one episode. `call` answers every attempt it is given, in order, one result
each, malformed ones included; it never raises for anything a model can write and never outlives its
deadlines. This package imports no torch, TRL or vLLM: a tool worker must start in well under a
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from toolgrpo.calls import CallAttempt, ToolResult

TOOL_TIMEOUT_S = 30.0  # seconds that a call may take where nobody says otherwise
TOOL_WORKERS = 4  # processes that run tools, likewise; forked from one, they share what it has imported


class AfterTurn(NamedTuple):
    """What a stateful environment says after the calls of a turn: its reward, and whether all is over."""

    reward: float | None = None
    over: bool = False


class ToolSession(Protocol):
    """The tools as one episode sees them."""

    @property
    def observation(self) -> str | None:
        """What a stateful environment says before the first turn, if anything."""
        ...

    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]: ...

    async def reward(self) -> float | None:
        """Return what a stateful environment gives for the episode so far, if anything."""
        ...

    async def after_turn(self) -> AfterTurn:
        """Return what a stateful environment says after the calls of a turn, if anything."""
        ...

    async def next_user_message(self, answer: str) -> str | None:
        """Return what a stateful environment says for the user to an answer, or None.

        Asked only of tools that say they speak (`speaks`).
        """
        ...

    async def __aenter__(self) -> ToolSession: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ToolProvider(Protocol):
    """What a `Toolbox` is to the rollout."""

    @property
    def names(self) -> list[str]: ...

    @property
    def schemas(self) -> list[dict[str, Any]]: ...

    def session(self, row: Mapping[str, Any]) -> ToolSession: ...

    def close(self) -> None: ...


def speaks(tools: ToolProvider | None) -> bool:
    """Return whether tools speak for the user in the middle of an episode.

    A provider of somebody's own that does not know of it does not.
    """
    return bool(getattr(tools, "speaks", False))
