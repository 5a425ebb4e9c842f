"""One tool worker: reads calls from its socket, runs them, answers. Many calls at a time.

Sync functions run on threads, async ones on a loop of their own, the socket is read on the main thread; so a tool that
blocks blocks its own thread (or its fellow coroutines) only. Deadlines are the trainer's business: a worker that cannot
keep them is killed, and the worker needs not agree.

After each call: builtins that the tool replaced are put back (and the worker asks to be replaced, since a fellow call may
have seen them), the working directory and umask are those of before (each thread has its own), and processes that a
stateless sync tool left behind are killed.

Not covered: threads of one worker share one interpreter, so a tool that changes another module's globals is seen by its
fellows until the worker is replaced. `@tool(isolate=True)` gives each call a process of its own.
"""

from __future__ import annotations

import asyncio
import builtins
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from toolgrpo.tools import process
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.argument_types import BadArguments, Bound
from toolgrpo.tools.plugin.loaded_plugin import Plugin
from toolgrpo.tools.plugin.plugin_file import LoadedTool
from toolgrpo.tools.render import UnrenderableResult, cut, describe_exception, render_result
from toolgrpo.tools.wire import pack, read_frame, unpack_objects
from toolgrpo.trajectory import ToolErrorKind

__all__ = ["Limits", "Worker"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What every worker is given."""

    threads: int = 64
    memory_mb: int = 4096  # of address space; 0: no limit
    max_result_chars: int = 1_000_000


class Worker:
    """Serves calls until its socket ends."""

    def __init__(self, sock: socket.socket, plugin: Plugin, limits: Limits) -> None:
        self._sock = sock
        self._plugin = plugin
        self._limits = limits
        self._pid = os.getpid()
        self._send_lock = threading.Lock()
        self._state = _ProcessState()
        self._threads = ThreadPoolExecutor(limits.threads, "tool", initializer=process.own_directory_per_thread)
        self._loop: LoopThread | None = None
        self._coroutines: dict[int, Future[None]] = {}
        self._kept: set[int] = set()  # processes that may outlive the call that started them
        self._instance: Any = None

    def serve(self) -> None:
        """Answer calls until the trainer is gone; never returns."""
        process.limit_memory(self._limits.memory_mb)
        process.first_to_be_killed(1000)
        os.register_at_fork(after_in_child=self._forget_socket)
        faulthandler.enable()
        self._send({"op": "ready"})
        while (message := read_frame(self._sock)) is not None:
            self._handle(message)
        os._exit(0)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "ping":
                self._send({"op": "pong"})
            case "cancel":
                if (running := self._coroutines.get(message["id"])) is not None:
                    running.cancel()
            case "call":
                tool = self._plugin.functions[message["tool"]]
                keep = tool.spec.keep_processes
                self._start(message["id"], tool.function, lambda: tool.convert.bind(message["args"]), keep=keep)
            case "method":
                tool = self._environment_tool(message["tool"])
                method = getattr(self._instance, tool.function.__name__)
                self._start(message["id"], method, lambda: tool.convert.bind(message["args"]), keep=True)
            case "open":
                self._threads.submit(self._open_environment, message["id"], message["row"])
            case "reward":
                environment = self._plugin.environment
                assert environment is not None and environment.reward_method is not None
                method = getattr(self._instance, environment.reward_method)
                self._start(message["id"], method, lambda: Bound((), {}), keep=True)
            case "close":
                method = getattr(self._instance, "close", None)
                self._start(message["id"], method or (lambda: None), lambda: Bound((), {}), keep=True)

    def _environment_tool(self, name: str) -> LoadedTool:
        assert self._plugin.environment is not None
        return self._plugin.environment.tools[name]

    def _open_environment(self, call_id: int, row: str) -> None:
        """Make the instance and reset it, on a thread as every user code; an async reset is awaited on the loop."""
        environment = self._plugin.environment
        assert environment is not None
        reply: dict[str, Any]
        try:
            self._instance = environment.factory()
            observation = self._instance.reset(**unpack_objects(row))
            if asyncio.iscoroutine(observation):
                observation = self._on_loop().submit(observation).result()
            if observation is not None and not isinstance(observation, str):
                raise TypeError(f"reset must return a string or None, got a {type(observation).__name__}")
            reply = {"text": observation}
        except BaseException as error:  # user code
            reply = {"error": ToolErrorKind.RAISED, "text": _log_traceback(error)}
        self._send({"id": call_id, **reply})

    def _start(self, call_id: int, function: Callable[..., Any], bind: Callable[[], Bound], *, keep: bool) -> None:
        target = function if hasattr(function, "__code__") or hasattr(function, "__func__") else type(function).__call__
        if asyncio.iscoroutinefunction(target):
            self._coroutines[call_id] = self._on_loop().submit(self._run_async(call_id, function, bind))
        else:
            self._threads.submit(self._run_sync, call_id, function, bind, keep)

    def _run_sync(self, call_id: int, function: Callable[..., Any], bind: Callable[[], Bound], keep: bool) -> None:
        try:
            bound = bind()
            value = function(*bound.args, **bound.kwargs)
            self._leave_forked_child()
            tainted = self._state.restore()
            reply = self._rendered(value)
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            self._leave_forked_child()
            tainted = self._state.restore()
            reply = self._failed(error)
        left_behind = set(process.children(threading.get_native_id())) - self._kept
        if keep:
            self._kept |= left_behind
        else:
            _kill(left_behind)
        self._send({"id": call_id, "retire": tainted, **reply})

    async def _run_async(self, call_id: int, function: Callable[..., Any], bind: Callable[[], Bound]) -> None:
        try:
            bound = bind()
            reply = self._rendered(await function(*bound.args, **bound.kwargs))
        except asyncio.CancelledError:
            reply = {"error": ToolErrorKind.TIMEOUT, "text": "cancelled"}
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            reply = self._failed(error)
        self._leave_forked_child()
        self._coroutines.pop(call_id, None)
        self._send({"id": call_id, "retire": self._state.restore(), **reply})

    def _rendered(self, value: object) -> dict[str, Any]:
        rendered = render_result(value, self._limits.max_result_chars)
        return {"text": rendered.text, "left_out": rendered.left_out}

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, BadArguments):
            return {"error": ToolErrorKind.BAD_ARGUMENTS, "text": str(error)}
        if isinstance(error, UnrenderableResult):
            return {"error": ToolErrorKind.BAD_RESULT, "text": str(error)}
        text = _log_traceback(error)
        if isinstance(error, MemoryError):
            text = f"out of memory (a tool may use {self._limits.memory_mb} MB)"
        return {"error": ToolErrorKind.RAISED, "text": text}

    def _send(self, message: dict[str, Any]) -> None:
        frame = pack(message)
        with self._send_lock:
            try:
                self._sock.sendall(frame)
            except OSError:
                os._exit(1)  # nobody listens any more, or the tool closed our socket: be replaced

    def _on_loop(self) -> LoopThread:
        if self._loop is None:
            self._loop = LoopThread("tool-async")
            self._loop.loop.call_soon_threadsafe(process.own_directory_per_thread)
        return self._loop

    def _forget_socket(self) -> None:
        """In a child that a tool forked: our socket is none of its business."""
        self._sock.close()

    def _leave_forked_child(self) -> None:
        """A child that a tool forked and that came back from the tool's function must not answer in its parent's name."""
        if os.getpid() != self._pid:
            os._exit(0)


class _ProcessState:
    """What a tool must leave as it found it."""

    def __init__(self) -> None:
        self._builtins = dict(vars(builtins))
        self._folder = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)

    def restore(self, _vars: Callable[[Any], dict[str, Any]] = vars) -> bool:
        """Put things back; True if builtins had been replaced."""
        now = builtins.__dict__
        tainted = False
        for name, value in self._builtins.items():
            if name not in now or now[name] is not value:
                now[name] = value
                tainted = tainted or name != "_"
        with suppress(OSError):
            if os.getcwd() != self._folder:
                os.chdir(self._folder)
        os.umask(self._umask)
        return tainted


def _kill(pids: set[int]) -> None:
    """End processes that a call started and did not wait for."""
    for pid in pids:
        with suppress(OSError):  # it may end by itself meanwhile
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _log_traceback(error: BaseException) -> str:
    """The error in a line for the model; the traceback goes to the log."""
    with suppress(BaseException):  # formatting calls user code
        sys.stderr.write("".join(traceback.format_exception(error, limit=-8)))
        sys.stderr.flush()
    return cut(describe_exception(error), 600).text
