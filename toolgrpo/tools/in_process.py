"""Tools that asked to run in the trainer's process: on a thread each, coroutines on a loop of their
own.

Deadlines are kept towards the model, but nothing can end such a tool: a call that overruns keeps
its thread, and a crash is the trainer's. `@tool(in_process=True)` is for tools that need the
trainer's own objects.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from toolgrpo.calls import ToolErrorKind
from toolgrpo.drops import DropEpisode
from toolgrpo.tools.backends import StatelessBackend
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.argument_types import BadArguments
from toolgrpo.tools.plugin.plugin_file import LoadedTool
from toolgrpo.tools.plugin.tool_spec import ToolSpec
from toolgrpo.tools.render import UnrenderableResult, describe_exception, render_result
from toolgrpo.tools.tool_reply import Reply


class InProcessBackend(StatelessBackend):
    """Functions in this process."""

    def __init__(
        self, tools: Sequence[LoadedTool], timeout_s: float, *, cache_all: bool, max_result_chars: int
    ) -> None:
        super().__init__([tool.spec for tool in tools], timeout_s, cache_all=cache_all)
        self._tools = {tool.spec.name: tool for tool in tools}
        self._max_result_chars = max_result_chars
        self._deadlines = LoopThread("toolgrpo-in-process")
        self._coroutines = LoopThread("toolgrpo-in-process-async")

    def submit(self, spec: ToolSpec, arguments: Mapping[str, Any], timeout_s: float) -> Future[Reply]:
        return self._deadlines.submit(self._run(self._tools[spec.name], arguments, timeout_s))

    def close(self) -> None:
        self._coroutines.close()
        self._deadlines.close()

    async def _run(self, tool: LoadedTool, arguments: Mapping[str, Any], timeout_s: float) -> Reply:
        started = time.monotonic()
        running: Future[Reply]
        if tool.spec.is_async:
            running = self._coroutines.submit(self._call_async(tool, arguments))
        else:
            running = Future()
            threading.Thread(target=self._call, args=(tool, arguments, running), daemon=True).start()
        try:
            reply = await asyncio.wait_for(asyncio.wrap_future(running), timeout_s)
        except TimeoutError:
            reply = Reply(f"no answer within {timeout_s:g} s", ToolErrorKind.TIMEOUT)
        return reply.timed(started, time.monotonic())

    def _call(self, tool: LoadedTool, arguments: Mapping[str, Any], result: Future[Reply]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            bound = tool.convert.bind(arguments)
            reply = self._rendered(tool.function(*bound.args, **bound.kwargs))
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            reply = _failed(error)
        result.set_result(reply)

    async def _call_async(self, tool: LoadedTool, arguments: Mapping[str, Any]) -> Reply:
        try:
            bound = tool.convert.bind(arguments)
            return self._rendered(await tool.function(*bound.args, **bound.kwargs))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            return _failed(error)

    def _rendered(self, value: object) -> Reply:
        rendered = render_result(value, self._max_result_chars)
        return Reply(rendered.text, left_out=rendered.left_out)


def _failed(error: BaseException) -> Reply:
    if isinstance(error, BadArguments):
        return Reply(str(error), ToolErrorKind.BAD_ARGUMENTS)
    if isinstance(error, UnrenderableResult):
        return Reply(str(error), ToolErrorKind.BAD_RESULT)
    if isinstance(error, DropEpisode):
        return Reply(error.reason, ToolErrorKind.DROPPED)
    return Reply(describe_exception(error), ToolErrorKind.RAISED)
