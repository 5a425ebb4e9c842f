"""The interface of tools for the rollout: names, schemas, and sessions that answer call attempts.

A session belongs to one episode. `call` answers every attempt it is given, in order, one result
each, malformed ones included; it never raises for anything a model can write and never outlives its
deadlines. This package imports no torch, TRL or vLLM: a tool worker must start in well under a
second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from toolgrpo.calls import CallAttempt, ToolErrorKind, ToolResult

TOOL_TIMEOUT_S = 30.0  # seconds that a call may take where nobody says otherwise
TOOL_WORKERS = 4  # processes that run tools, likewise; forked from one, they share what it has imported


class AfterTurn(NamedTuple):
    """An environment's reward for the calls of a turn, if any, and whether it ends the episode."""

    reward: float | None = None
    over: bool = False


class EpisodeHooks:
    """The optional answers of a stateful environment; these defaults are those of tools without state."""

    @property
    def observation(self) -> str | None:
        """The text before the first turn, if any."""
        return None

    async def reward(self) -> float | None:
        """Return the reward of the episode so far, if any."""
        return None

    async def after_turn(self) -> AfterTurn:
        """Return what there is to say after the calls of a turn."""
        return AfterTurn()

    async def next_user_message(self, answer: str) -> str | None:
        """Return what the user says to an answer, or None; asked only of tools that speak (`speaks`)."""
        return None


class ToolSession(EpisodeHooks, ABC):
    """The tools of one episode. The hooks are those of its environment, if there is one."""

    def __init__(self, hooks: EpisodeHooks | None = None) -> None:
        self._hooks = hooks or EpisodeHooks()

    @abstractmethod
    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]: ...

    @property
    def observation(self) -> str | None:
        return self._hooks.observation

    async def reward(self) -> float | None:
        return await self._hooks.reward()

    async def after_turn(self) -> AfterTurn:
        return await self._hooks.after_turn()

    async def next_user_message(self, answer: str) -> str | None:
        return await self._hooks.next_user_message(answer)

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ToolProvider(Protocol):
    """The rollout's view of a `Toolbox`."""

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


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a worker, an environment or a server: a text, or an error with its message.

    Times are of `time.monotonic`.
    """

    text: str
    error: ToolErrorKind | None = None
    left_out: int = 0  # characters that were cut out of the text
    started: float = 0.0
    ended: float = 0.0
    cached: bool = False
    silent: bool = False  # there was no text at all, as for an environment without a first observation

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Reply:
        """Read a worker's frame.

        What does not look like one is the tool's doing and counts as its death.
        """
        error, text, left_out = message.get("error"), message.get("text"), message.get("left_out", 0)
        if error is not None and error not in list(ToolErrorKind):
            return cls("the process of the tool answered nonsense", ToolErrorKind.DIED)
        return cls(
            text=text if isinstance(text, str) else "",
            error=None if error is None else ToolErrorKind(error),
            left_out=left_out if isinstance(left_out, int) and left_out > 0 else 0,
            silent=text is None,
        )

    def timed(self, started: float, ended: float) -> Reply:
        return replace(self, started=started or ended, ended=ended)
