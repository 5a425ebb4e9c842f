"""Tools that answer what a test tells them to, after a delay on the event loop's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolgrpo.episode.tool_calls import RUNNABLE, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.tools.base import AfterTurn, ToolSession

Answer = str | ToolResult


class ScriptedTools:
    """A `ToolProvider`:
    `answers[name](**arguments)` gives the text of a result, or a whole `ToolResult`.

    What tests look at: `calls` (name and arguments, in order), `open_sessions`, `closed_sessions`.
    """

    def __init__(
        self,
        answers: Mapping[str, Callable[..., Answer]],
        *,
        delay_s: float = 0.0,
        observation: Callable[[Mapping[str, Any]], str | None] = lambda row: None,
        reward: Callable[[Mapping[str, Any]], float | None] = lambda row: None,
        after_turn: Callable[[Mapping[str, Any]], AfterTurn] = lambda row: AfterTurn(),
        user: Callable[[str], str | None] | None = None,
    ) -> None:
        self.answers = dict(answers)
        self.delay_s = delay_s
        self.observation = observation
        self.reward = reward
        self.after_turn = after_turn
        self.user = user
        self.calls: list[tuple[str | None, Mapping[str, Any] | None]] = []
        self.open_sessions = 0
        self.closed_sessions = 0

    @property
    def names(self) -> list[str]:
        return list(self.answers)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in self.answers]

    @property
    def speaks(self) -> bool:
        return self.user is not None

    def session(self, row: Mapping[str, Any]) -> _Session:
        return _Session(self, row)

    def close(self) -> None:
        pass


class _Session(ToolSession):
    def __init__(self, tools: ScriptedTools, row: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools = tools
        self._row = row

    @property
    def observation(self) -> str | None:
        return self._tools.observation(self._row)

    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]:
        self._tools.calls += [(attempt.name, attempt.arguments) for attempt in attempts]
        await asyncio.sleep(self._tools.delay_s)
        return tuple(self._answer(attempt) for attempt in attempts)

    def _answer(self, attempt: CallAttempt) -> ToolResult:
        if attempt.status not in RUNNABLE:
            return ToolResult(f"Error: {attempt.detail}", attempt.name, ToolErrorKind(attempt.status))
        if attempt.name not in self._tools.answers:
            return ToolResult(f"Error: no tool {attempt.name}", attempt.name, ToolErrorKind.UNKNOWN_TOOL)
        answer = self._tools.answers[attempt.name](**(attempt.arguments or {}))
        if isinstance(answer, ToolResult):
            return answer
        return ToolResult(answer, attempt.name, duration_s=self._tools.delay_s)

    async def reward(self) -> float | None:
        return self._tools.reward(self._row)

    async def after_turn(self) -> AfterTurn:
        return self._tools.after_turn(self._row)

    async def next_user_message(self, answer: str) -> str | None:
        await asyncio.sleep(self._tools.delay_s)
        return None if self._tools.user is None else self._tools.user(answer)

    async def __aenter__(self) -> _Session:
        self._tools.open_sessions += 1
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._tools.open_sessions -= 1
        self._tools.closed_sessions += 1
