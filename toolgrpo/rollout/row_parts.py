"""Everything of an episode that its row decides: messages, thinking, tools, and what its user says later.

A row whose column `tools` names some of the tools is shown only these, and can call only these.
It can call those of its column `hidden_tools` too, which its prompt does not show: something later in
the conversation will, a user or a result.

A row whose column `user_turns` lists texts has the user say them one after the other, each when the
model has answered the one before: when it ends a turn without a call. An environment with
`next_user_message` is asked then instead. Neither of them: the first answer ends the episode.

Invariants: a row without names gets all tools; the tools keep the order of the toolbox; a call of a
tool that was not offered is answered like a call of a tool that does not exist, and never reaches
it. An episode has one speaker: where a row has a script and its environment speaks too, that is an
error, because each would take the other's messages for none.

Not covered: tools that a row would bring itself; names only choose among those that were loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolgrpo.episode.tool_calls import RUNNABLE, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.episode.trajectory import Message, StopReason, joined_text
from toolgrpo.errors import DataError
from toolgrpo.rollout.batch import Row
from toolgrpo.support.shipped_files import nearest
from toolgrpo.tools.base import ToolProvider, ToolSession, speaks

TOOL_COLUMNS = ("tools", "hidden_tools", "expected_tools", "gold_calls")
OFFERED = TOOL_COLUMNS[:2]  # which an episode cannot do without


def as_messages(prompt: str | Sequence[Message]) -> tuple[Message, ...]:
    """Return the conversation that an episode of this prompt starts from."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    said = (dict(message) for message in prompt)
    return tuple({**one, "content": joined_text(one["content"])} if "content" in one else one for one in said)


def thinking_of(row: Row, default: bool | None) -> bool | None:
    """Return what a chat template is told of thinking: a row's own column decides."""
    own = row.get("enable_thinking")
    return default if own is None else bool(own)


def offered_tools(tools: ToolProvider | None, row: Mapping[str, Any]) -> ToolProvider | None:
    """Return the tools that an episode of this row has."""
    names, hidden = row.get("tools"), row.get("hidden_tools") or ()
    if names is None and not hidden:
        return tools
    check_tool_names(tools, names or ())
    check_tool_names(tools, hidden, "hidden_tools")
    if tools is None:
        return None
    shown = tools.names if names is None else names
    return _Offered(tools, frozenset(shown) - frozenset(hidden), frozenset(hidden))


def may_call(row: Mapping[str, Any], tool: str) -> bool:
    """Return whether an episode of this row has a tool, shown or hidden."""
    names = row.get("tools")
    return names is None or tool in names or tool in (row.get("hidden_tools") or ())


def check_tool_names(
    tools: ToolProvider | None, names: Iterable[str], column: str = "tools", row: str = "a row"
) -> None:
    """Raise `DataError` if a row names a tool that was not loaded."""
    for name in names:
        if tools is None or name not in tools.names:
            raise DataError(f"{row} {_no_such_tool(tools, name, column)}")


def rows_without_their_tools(
    tools: ToolProvider | None, rows: Any, columns: Iterable[str] = TOOL_COLUMNS
) -> dict[int, str]:
    """Return which rows of a table name a tool that was not loaded, by their number, and what is wrong with each."""
    known, found = frozenset(() if tools is None else tools.names), dict[int, str]()
    for column in columns:
        for number, value in enumerate(rows[column] if column in rows.column_names else ()):
            if column in OFFERED and value is not None and value != _tool_names(value):
                found.setdefault(
                    number, f"has no list of names of loaded tools in its column `{column}`, but {value!r:.60}"
                )
            missing = next((name for name in _tool_names(value) if name not in known), None)
            if missing is not None:
                found.setdefault(number, _no_such_tool(tools, missing, column))
    return found


def _tool_names(value: Any) -> list[str]:
    """Return the tools that a cell names: a list of names or of calls, also as JSON. Of any other form: none."""
    try:
        listed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return []
    named = [one.get("name") if isinstance(one, Mapping) else one for one in listed] if isinstance(listed, list) else []
    return [name for name in named if isinstance(name, str)]


def named_tools(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tools that a row names as right, in `expected_tools` or `gold_calls`, each once."""
    named = _tool_names(row.get("expected_tools")) or _tool_names(row.get("gold_calls"))
    return tuple(dict.fromkeys(named))


def _no_such_tool(tools: ToolProvider | None, name: str, column: str) -> str:
    near = nearest(name, () if tools is None else tools.names)
    hint = f"the nearest is {near[0]!r}" if near else "no tools were loaded (--tools_script)"
    return f"names the tool {name!r} in its column `{column}`, but there is no such tool; {hint}"


class _Offered:
    """A `ToolProvider` that hides some tools of another one."""

    def __init__(self, tools: ToolProvider, names: frozenset[str], hidden: frozenset[str]) -> None:
        self._tools = tools
        self._offered = names
        self._hidden = hidden

    @property
    def names(self) -> list[str]:
        return [name for name in self._tools.names if name in self._offered]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [
            schema for name, schema in zip(self._tools.names, self._tools.schemas, strict=True) if name in self._offered
        ]

    @property
    def speaks(self) -> bool:
        return speaks(self._tools)

    def session(self, row: Mapping[str, Any]) -> ToolSession:
        return _OfferedSession(self._tools.session(row), self.names, self._hidden)

    def close(self) -> None:
        self._tools.close()


class _OfferedSession(ToolSession):
    """A session that answers calls of tools that are not offered itself."""

    def __init__(self, session: ToolSession, names: Sequence[str], hidden: frozenset[str]) -> None:
        super().__init__(session)
        self._session = session
        self._names = names
        self._callable = hidden.union(names)

    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]:
        refused = {index: self._refuse(attempt) for index, attempt in enumerate(attempts) if self._is_strange(attempt)}
        allowed = [attempt for index, attempt in enumerate(attempts) if index not in refused]
        answered = iter(await self._session.call(allowed) if allowed else ())
        return tuple(refused[index] if index in refused else next(answered) for index in range(len(attempts)))

    async def __aenter__(self) -> _OfferedSession:
        await self._session.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._session.__aexit__(*raised)

    def _is_strange(self, attempt: CallAttempt) -> bool:
        """Return whether a well-formed call names a tool that the row does not offer.

        Malformed attempts pass: the session says what is wrong with them.
        """
        return attempt.status in RUNNABLE and attempt.name is not None and attempt.name not in self._callable

    def _refuse(self, attempt: CallAttempt) -> ToolResult:
        known = f"The tools are: {', '.join(self._names)}" if self._names else "There are no tools for this question"
        content = f"Error: there is no tool named '{str(attempt.name)[:80]}'. {known}."
        return ToolResult(content, attempt.name, ToolErrorKind.UNKNOWN_TOOL)


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
            "a row has the column `user_turns`, and the environment has next_user_message: both would write the user's messages. "
            "Leave one of them out; an environment gets the row in reset, under another name of the column too."
        )


def users_speak(tools: ToolProvider | None, rows: Any) -> bool:
    """Return whether users speak in the middle of episodes of this data set."""
    return speaks(tools) or "user_turns" in (getattr(rows, "column_names", None) or ())
