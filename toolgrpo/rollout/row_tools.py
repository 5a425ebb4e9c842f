"""The tools of one row:
a row whose column `tools` names some of the tools is shown only these, and can call only these.

It can call those of its column `hidden_tools` too, which its prompt does not show: something later in
the conversation will, a user or a result.

Invariants: a row without names gets all tools; the tools keep the order of the toolbox; a call of a
tool that was not offered is answered like a call of a tool that does not exist, and never reaches
it.

Not covered: tools that a row would bring itself; names only choose among those that were loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolgrpo.calls import AttemptStatus, CallAttempt, ToolErrorKind, ToolResult
from toolgrpo.errors import DataError
from toolgrpo.named_files import nearest
from toolgrpo.tools.base import ToolProvider, ToolSession, speaks


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


def check_tool_names(
    tools: ToolProvider | None, names: Iterable[str], column: str = "tools", row: str = "a row"
) -> None:
    """Raise `DataError` if a row names a tool that was not loaded."""
    known = [] if tools is None else tools.names
    for name in names:
        if name not in known:
            near = nearest(str(name), known)
            hint = f"the nearest is {near[0]!r}" if near else "no tools were loaded (--tools_script)"
            raise DataError(
                f"{row} names the tool {name!r} in its column `{column}`, but there is no such tool; {hint}"
            )


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
        return attempt.status is AttemptStatus.OK and attempt.name is not None and attempt.name not in self._callable

    def _refuse(self, attempt: CallAttempt) -> ToolResult:
        known = f"The tools are: {', '.join(self._names)}" if self._names else "There are no tools for this question"
        content = f"Error: there is no tool named '{str(attempt.name)[:80]}'. {known}."
        return ToolResult(content, attempt.name, ToolErrorKind.UNKNOWN_TOOL)
