"""The interface of tools for the rollout: names, schemas, and sessions that answer call attempts.

A session belongs to one episode. `call` answers every attempt it is given, in order, one result
each, malformed ones included; it never raises for anything a model can write and never outlives its
deadlines. This package imports no torch, TRL or vLLM: a tool worker must start in well under a
second.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

from toolgrpo.episode.tool_calls import CallAttempt, ToolErrorKind, ToolResult

T = TypeVar("T")
TOOL_TIMEOUT_S = 30.0  # seconds that a call may take where nobody says otherwise
TOOL_WORKERS = 4  # processes that run tools, likewise; forked from one, they share what it has imported


class AfterTurn(NamedTuple):
    """An environment's reward for the calls of a turn, if any, and whether it ends the episode."""

    reward: float | None = None
    over: bool = False


HOOKS = ("reward", "get_reward", "step_reward", "episode_over", "next_user_message", "close")
"""The optional methods of an environment's class, none of which is a tool."""


class EpisodeHooks:
    """Questions to a stateful environment, beside its calls. `ask` reaches it; without one there is no answer."""

    @property
    def observation(self) -> str | None:
        """The text before the first turn, if any."""
        return None

    async def ask(self, hook: str, *args: str, read: Callable[[str], T]) -> T | None:
        """Return what `read` makes of the answer of one of `HOOKS`; None if there is no such method or answer.

        A ValueError of `read` says what is wrong with the answer.
        """
        return None

    async def reward(self) -> float | None:
        """Return the reward of the episode so far, if any."""
        own = await self.ask("reward", read=_as_reward)
        return await self.ask("get_reward", read=_as_reward) if own is None else own

    async def after_turn(self) -> AfterTurn:
        """Return what there is to say after the calls of a turn."""
        reward = await self.ask("step_reward", read=_as_step_reward)
        return AfterTurn(reward, bool(await self.ask("episode_over", read=_as_truth)))

    async def next_user_message(self, answer: str) -> str | None:
        """Return what the user says to an answer, or None; asked only of tools that speak (`speaks`)."""
        return await self.ask("next_user_message", answer, read=str)


def _as_reward(text: str) -> float | None:
    if text == "null":
        return None
    try:
        reward = float({"true": "1", "false": "0"}.get(text, text))  # as torch takes a bool
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise ValueError(f"must be a finite number or None, got {text[:80]}")
    return reward


def _as_step_reward(text: str) -> float:
    reward = _as_reward(text)
    if reward is None:
        raise ValueError("must be a finite number, got None; for nothing to say, give 0")
    return reward


def _as_truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"must be True or False, got {text[:80]}")
    return text == "true"


class ToolSession(EpisodeHooks, ABC):
    """The tools of one episode. The hooks are those of its environment, if there is one."""

    def __init__(self, hooks: EpisodeHooks | None = None) -> None:
        self._hooks = hooks or EpisodeHooks()

    @abstractmethod
    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]: ...

    @property
    def observation(self) -> str | None:
        return self._hooks.observation

    async def ask(self, hook: str, *args: str, read: Callable[[str], T]) -> T | None:
        return await self._hooks.ask(hook, *args, read=read)

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *raised: object) -> None: ...


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
