"""`load_tools`, `run_tool` and the `Toolbox` between them.

A `Toolbox` joins what it was given: functions in worker processes, functions in this process, an
environment class, MCP servers. Each is a backend with specs; a session of the toolbox is one
session of each backend. The toolbox checks names and arguments and turns every answer into one
`ToolResult`; nothing that a model can write raises here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar, overload

from toolgrpo.episode.tool_calls import RUNNABLE, AttemptStatus, CallAttempt, ToolErrorKind, ToolResult, written
from toolgrpo.errors import PluginError
from toolgrpo.tools.arguments import ArgumentChecker, example_of, names_near
from toolgrpo.tools.backends import BackendSession, EnvironmentBackend, EnvironmentSession, ToolBackend
from toolgrpo.tools.base import TOOL_TIMEOUT_S, ToolSession
from toolgrpo.tools.bounds import read_json
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.render import RenderedText, cut

_MAX_ERROR_CHARS = 1000
T = TypeVar("T")


# A tool call as a model or a test writes it, text or object, as a `CallAttempt`. Never raises.

_FORM = '{"name": "...", "arguments": {...}}'


def parse_call(call: object) -> CallAttempt:
    """Read a call, `{"name": ..., "arguments": {...}}`, as text or object.

    The OpenAI form with a `function` inside is understood too.
    """
    if isinstance(call, CallAttempt):
        return call
    raw = call if isinstance(call, str) else _written(call)
    if isinstance(call, str):
        try:
            call = read_json(call)
        except ValueError as error:
            return _bad(AttemptStatus.INVALID_JSON, raw, f"this is not valid JSON ({error}). Write {_FORM}")
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        call = call["function"]
    if not isinstance(call, Mapping):
        return _bad(AttemptStatus.INVALID_JSON, raw, f"a tool call must be an object, got {_kind(call)}. Write {_FORM}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return _bad(AttemptStatus.MISSING_NAME, raw, f'the tool call has no "name". Write {_FORM}')
    arguments: Any = call.get("arguments", {})
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return _bad(AttemptStatus.INVALID_JSON, raw, f'the "arguments" are not valid JSON ({error})', name)
    if not isinstance(arguments, Mapping):
        detail = f'"arguments" must be an object like {{"key": value}}, got {_kind(arguments)}'
        return _bad(AttemptStatus.BAD_ARGUMENTS, raw, detail, name)
    return CallAttempt(AttemptStatus.OK, raw, name, {str(key): value for key, value in arguments.items()})


def _bad(status: AttemptStatus, raw: str, detail: str, name: str | None = None) -> CallAttempt:
    return CallAttempt(status, raw, name, None, detail)


def _written(call: object) -> str:
    try:
        return repr(call)
    except (RecursionError, ValueError) as error:  # nested without end; an integer with too many digits
        return f"({type(call).__name__} that cannot be shown: {error})"


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


class KnownTool(NamedTuple):
    """One tool of a toolbox, and which of its backends runs it."""

    spec: ToolSpec
    checker: ArgumentChecker
    backend: int


class Toolbox:
    """The tools of a run. Use `load_tools` to make one; `close` ends its processes."""

    def __init__(
        self,
        backends: Sequence[ToolBackend],
        order: Sequence[str] = (),
        *,
        timeout_s: float = TOOL_TIMEOUT_S,
        notices: Sequence[str] = (),
    ) -> None:
        self.timeout_s = timeout_s  # of a call, unless its tool says otherwise
        self.notices = tuple(notices)  # what its user should know, in sentences
        self._backends = tuple(backends)
        self._loop: LoopThread | None = None
        tools: dict[str, KnownTool] = {}
        for index, backend in enumerate(self._backends):
            for spec in backend.specs:
                if spec.name in tools:
                    raise PluginError(
                        f"Two tools are named '{spec.name}', from different sources. Rename one; for a tool of an MCP server, "
                        'give its server a "prefix" in the MCP configuration.'
                    )
                checker = ArgumentChecker(spec.name, spec.parameters, unchecked=spec.unchecked, closed=spec.closed)
                tools[spec.name] = KnownTool(spec, checker, index)
        first = [name for name in order if name in tools]
        self.tools = {name: tools[name] for name in dict.fromkeys([*first, *tools])}

    @property
    def names(self) -> list[str]:
        return list(self.tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The OpenAI function form of every tool, for a chat template."""
        return [dict(tool.spec.schema) for tool in self.tools.values()]

    @property
    def speaks(self) -> bool:
        """Return whether its environment speaks for the user in the middle of an episode."""
        return any(getattr(backend, "speaks", False) for backend in self._backends)

    @property
    def has_environment(self) -> bool:
        """Return whether an environment may add to the prompt of a row."""
        return any(isinstance(backend, EnvironmentBackend) for backend in self._backends)

    def session(self, row: Mapping[str, Any]) -> ToolboxSession:
        """Return the tools as one episode sees them: `async with`, or `with` to try them by hand.

        `row` goes to the environment's reset, if there is one.
        """
        names, hidden = row.get("tools"), row.get("hidden_tools") or ()
        shown = [name for name in self.tools if (names is None or name in names) and name not in hidden]
        return ToolboxSession(self, [backend.session(row) for backend in self._backends], shown)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on a loop of this toolbox's own, for whoever has none."""
        if self._loop is None:
            self._loop = LoopThread("toolgrpo-run-tool")
        return self._loop.submit(work).result()

    def close(self) -> None:
        """End every process. Safe to call twice."""
        for backend in self._backends:
            backend.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class ToolboxSession(ToolSession):
    """The tools as one episode sees them: an async context manager.

    With a plain `with` it can be tried by hand: `run` answers one call, and state is kept from one
    to the next.
    """

    def __init__(self, toolbox: Toolbox, parts: Sequence[BackendSession], shown: Sequence[str]) -> None:
        super().__init__(next((part for part in parts if isinstance(part, EnvironmentSession)), None))
        self._toolbox = toolbox
        self._parts = parts
        self._shown = shown  # the tools that the model is shown
        self._open = AsyncExitStack()
        self._began = time.monotonic()

    async def __aenter__(self) -> ToolboxSession:
        self._began = time.monotonic()
        async with AsyncExitStack() as stack:
            for part in self._parts:
                stack.push_async_callback(part.leave)
                await part.open()
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._open.aclose()

    def __enter__(self) -> ToolboxSession:
        return self._toolbox.wait_for(self.__aenter__())

    def __exit__(self, *raised: object) -> None:
        self._toolbox.wait_for(self.__aexit__(*raised))

    def run(self, call: object) -> ToolResult:
        """Answer one call, written as in `run_tool`: `content` is what the model would read."""
        return self._toolbox.wait_for(self.call([parse_call(call)]))[0]

    async def call(self, attempts: Sequence[CallAttempt]) -> tuple[ToolResult, ...]:
        """Answer all attempts at the same time, in their order."""
        return tuple(await asyncio.gather(*(self._answer(attempt) for attempt in attempts)))

    async def _answer(self, attempt: CallAttempt) -> ToolResult:
        runs = attempt.status in RUNNABLE
        if not runs or attempt.name is None:
            detail = self._filled(attempt.detail or "a malformed call", f"{attempt.name} {attempt.raw}")
            kind = ToolErrorKind.MISSING_NAME if runs else ToolErrorKind(attempt.status)
            return self._refuse(attempt, kind, detail)
        found = self._toolbox.tools.get(attempt.name)
        if found is None:
            close = names_near(attempt.name, self._toolbox.names)
            hint = f"did you mean {close}? " if close else ""
            known = ", ".join(self._toolbox.names)
            detail = f"there is no tool named '{attempt.name[:80]}'; {hint}The tools are: {known}"
            return self._refuse(attempt, ToolErrorKind.UNKNOWN_TOOL, detail)
        spec, checker, backend = found
        checked = checker.check(attempt.arguments or {})
        if checked.complaint is not None:
            return self._refuse(attempt, ToolErrorKind.BAD_ARGUMENTS, checked.complaint)
        reply = await self._parts[backend].call(spec, checked.arguments)
        shown = RenderedText(reply.text, reply.left_out)
        if reply.error is not None:
            shown = cut(f"Error: {spec.name}: {reply.text}", _MAX_ERROR_CHARS, reply.left_out)
        return ToolResult(
            content=shown.text,
            name=spec.name,
            error=reply.error,
            started_s=max(0.0, reply.started - self._began),
            duration_s=max(0.0, reply.ended - reply.started),
            left_out=shown.left_out,
            cached=reply.cached,
            ends_episode=spec.ends_episode and reply.error is None,
        )

    def _filled(self, detail: str, said: str) -> str:
        """Return a complaint with a whole call for the form that it shows: of the tool that the model named, or the first."""
        if not self._shown or "{...}" not in detail:
            return detail
        name = max((name for name in self._shown if name in said), key=len, default=self._shown[0])
        return written(detail, name, example_of(self._toolbox.tools[name].spec.parameters))

    def _refuse(self, attempt: CallAttempt, kind: ToolErrorKind, detail: str) -> ToolResult:
        shown = cut(f"Error: {detail}", _MAX_ERROR_CHARS)
        started_s = time.monotonic() - self._began
        return ToolResult(shown.text, attempt.name, kind, started_s=started_s, left_out=shown.left_out)


@overload
def run_tool(  # type: ignore[overload-overlap]  # a list is an object too; with a row it means several calls
    toolbox: Toolbox, call: list[Any], *, row: Mapping[str, Any]
) -> list[ToolResult]: ...
@overload
def run_tool(toolbox: Toolbox, call: object, *, row: Mapping[str, Any] | None = None) -> ToolResult: ...
def run_tool(toolbox: Toolbox, call: object, *, row: Mapping[str, Any] | None = None) -> ToolResult | list[ToolResult]:
    """Run one call, given as `{"name": ..., "arguments": {...}}`, text or object.

    With a `row` it runs in an episode of that row, which an environment's reset gets, and a list of
    calls runs one after the other in the same episode. Never raises for what a model can write.
    """
    with toolbox.session(row or {}) as session:
        if row is not None and isinstance(call, list):
            return [session.run(one) for one in call]
        return session.run(call)
