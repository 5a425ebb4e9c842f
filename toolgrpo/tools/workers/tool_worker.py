"""One tool worker: reads calls from its socket, runs them, answers. Many calls at a time.

Sync functions run on threads, async ones on a loop of their own, the socket is read on the main
thread; so a tool that blocks blocks its own thread (or its fellow coroutines) only. Deadlines are
the trainer's business: a worker that cannot keep them is killed, and the worker needs not agree.

A call is announced (`begun`) before any of its code runs; what has not begun can be taken back
(`withdraw`), and is given back (`returned`) where it cannot begin. So the trainer knows of every
call whether it may have had effects, also when this process is gone.

After each call the process is put right (`Health`), and replaced where it runs out of something: the
reply says `retire` and why. Processes that a stateless sync tool left behind are killed.

Not covered: threads of one worker share one interpreter, so a tool that changes builtins or another
module's globals is seen by its fellows. `@tool(isolate=True)` gives each call a process of its own.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from confined_python.processes.linux import (
    children,
    kill_group,
    limit_memory,
    offer_to_oom_killer,
    own_directory_per_thread,
)
from confined_python.processes.wire import pack, receive, unpack_objects
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.plugin.plugin_file import Plugin
from toolgrpo.tools.render import describe_failure, encodable, render_result

_SPENT = 0.9  # of what was free at birth: descriptors, and address space where it is limited
_STRAY_DESCRIPTORS = 4096  # where the limit is higher: what leaks takes the machine's memory too
_STRAY_THREADS = 128  # beyond those that run calls


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The number of workers, and the limits of each."""

    workers: int = 4
    threads: int = 64
    memory_mb: int = 4096  # of address space; 0: no limit
    max_result_chars: int = 1_000_000
    load_timeout_s: float = 120.0


class _Asked(NamedTuple):
    """A call as its worker runs it."""

    function: Callable[[], Any]
    is_async: bool = False
    keep: bool = True  # the processes that it leaves behind
    says: str = ""  # the method, of those that say a text or nothing


class Worker:
    """Serves calls until its socket ends."""

    def __init__(self, sock: socket.socket, plugin: Plugin, options: PoolOptions) -> None:
        self._sock = sock
        self._plugin = plugin
        self._options = options
        self._pid = os.getpid()
        self._send_lock = threading.Lock()
        self._begin_lock = threading.Lock()
        self._unbegun: set[int] = set()  # calls that no code of a tool has run for
        self._running: set[int] = set()
        self._threads = ThreadPoolExecutor(options.threads, "tool", initializer=own_directory_per_thread)
        self._own_thread = ThreadPoolExecutor(1, "environment", initializer=own_directory_per_thread)
        self._loop: LoopThread | None = None
        self._coroutines: dict[int, Future[None]] = {}
        self._kept: set[int] = set()  # processes that may outlive the call that started them
        self._instance: Any = None

    def serve(self) -> None:
        """Answer calls until the trainer is gone; never return."""
        mb = self._options.memory_mb  # beside what the import of the tools has mapped
        limit_memory(mb and mb + (int(_mapped_bytes()) >> 20))
        self._health = Health(self._options.threads)  # with the limits of its life
        offer_to_oom_killer(1000)
        signal.signal(signal.SIGINT, lambda *_: None)  # a tool may interrupt the main thread, which is ours
        os.register_at_fork(after_in_child=self._sock.close)  # a child that a tool forks has no part in it
        faulthandler.enable()
        self._send({"op": "ready"})
        while (message := receive(self._sock)) is not None:
            self._handle(message)
        os._exit(0)

    def _handle(self, message: dict[str, Any]) -> None:
        op, call_id = message["op"], message.get("id", 0)
        match op:
            case "ping":
                self._send({"op": "pong"})
            case "cancel":
                if (running := self._coroutines.get(call_id)) is not None:
                    running.cancel()
            case "withdraw":
                self._give_back(message["ids"])
            case _:
                self._unbegun.add(call_id)
                if op == "call" and (complaint := self._health.complaint()) is not None:
                    self._give_back([call_id], retire=complaint)
                    return
                asked = self._asked(message)
                try:
                    if not asked.is_async:
                        # an environment's state may belong to its thread (sqlite3); only a close beside a call needs another
                        threads = self._threads if op == "call" or self._running else self._own_thread
                        threads.submit(self._run_sync, call_id, asked)
                        return
                    running = self._on_loop().submit(self._run_async(call_id, asked))
                except RuntimeError as error:  # there can be no more threads, and so perhaps no loop
                    self._give_back([call_id], retire=str(error))
                    return
                self._coroutines[call_id] = running
                running.add_done_callback(lambda _: self._coroutines.pop(call_id, None))

    def _asked(self, message: dict[str, Any]) -> _Asked:
        """Return what to run for a message: a tool, or a method of the environment."""
        match message["op"]:
            case "call":
                tool = self._plugin.functions[message["tool"]]
                run = partial(tool.call, message["args"])
                return _Asked(run, tool.spec.is_async, tool.spec.keep_processes)
            case "open":
                return _Asked(partial(self._opened, message["row"]), says="reset")
            case "method":
                assert self._plugin.environment is not None
                tool = self._plugin.environment.tools[message["tool"]]
                return _Asked(partial(tool.call, message["args"], self._instance), tool.spec.is_async)
        name = message["method"]  # a hook
        says = name if name == "next_user_message" else ""
        return _Asked(lambda: getattr(self._instance, name)(*message["args"]), says=says)

    def _opened(self, row: str) -> object:
        """Make the instance and reset it; return what it says."""
        assert self._plugin.environment is not None
        self._instance = self._plugin.environment.factory()
        said = self._waited(self._instance.reset(**unpack_objects(row)))
        for name in self._plugin.environment.methods:
            if not callable(hidden := getattr(self._instance, "__dict__", {}).get(name, callable)):
                raise TypeError(
                    f"self.{name} is set to a {type(hidden).__name__}, which hides the method {name}; rename one of them"
                )
        return said

    def _waited(self, value: Any) -> Any:
        """Return a value, that of a coroutine once the loop has run it: a plain decorator hides `async def`."""
        return self._on_loop().submit(value).result() if inspect.iscoroutine(value) else value

    def _begin(self, call_id: int) -> bool:
        """Announce that the tool's code runs from here on; False if the call was given back."""
        # one lock for beginning and giving back: a call must not be run here and elsewhere too
        with self._begin_lock:
            if call_id not in self._unbegun:
                return False
            self._unbegun.discard(call_id)
            self._running.add(call_id)
        self._send({"begun": call_id})
        return True

    def _give_back(self, call_ids: list[int], *, retire: str | None = None) -> None:
        for call_id in call_ids:
            with self._begin_lock:
                if call_id not in self._unbegun:
                    continue
                self._unbegun.discard(call_id)
            self._send({"returned": call_id, "retire": retire})

    def _run_sync(self, call_id: int, asked: _Asked) -> None:
        if not self._begin(call_id):
            return
        try:
            reply = self._reply(self._waited(asked.function()), asked.says)
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            reply = self._failed(error)
        # before the reply is sent: after it the trainer may send the next call, which is to find the folder as it was
        self._put_right(call_id)
        left_behind = set(children(threading.get_native_id())) - self._kept
        if asked.keep:
            self._kept |= left_behind
        else:
            _kill(left_behind)
        self._send({"id": call_id, "retire": self._health.complaint(), **reply})

    async def _run_async(self, call_id: int, asked: _Asked) -> None:
        if not self._begin(call_id):
            return
        try:
            reply = self._reply(await asked.function(), asked.says)
        except asyncio.CancelledError:
            reply = {"error": ToolErrorKind.TIMEOUT, "text": "cancelled"}
        except BaseException as error:  # the executor: a tool may raise anything, SystemExit included
            reply = self._failed(error)
        self._put_right(call_id)
        self._send({"id": call_id, "retire": self._health.complaint(), **reply})

    def _reply(self, value: object, says: str) -> dict[str, Any]:
        """Return the reply for what a call returned; of a method that says something or nothing as it is."""
        if not says:
            shown = render_result(value, self._options.max_result_chars)
            return {"text": shown.text, "left_out": shown.left_out}
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{says} must return a string or None, got a {type(value).__name__}")
        return {"text": value if value is None else encodable(value)}

    def _failed(self, error: BaseException) -> dict[str, Any]:
        kind, text = describe_failure(error)
        if kind is ToolErrorKind.RAISED:
            _log_traceback(error)
        if isinstance(error, MemoryError):
            text = f"out of memory (a tool may use {self._options.memory_mb} MB)"
        return {"error": kind, "text": text}

    def _send(self, message: dict[str, Any]) -> None:
        frame = pack(message)
        with self._send_lock:
            try:
                self._sock.sendall(frame)
            except OSError:
                os._exit(1)  # nobody listens any more, or the tool closed our socket: be replaced

    def _on_loop(self) -> LoopThread:
        if self._loop is None or not self._loop.alive:
            self._loop = LoopThread("tool-async")
            self._loop.loop.call_soon_threadsafe(own_directory_per_thread)
        return self._loop

    def _put_right(self, call_id: int) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a child that a tool forked came back from its function: it must not answer for its parent
        with self._begin_lock:
            self._running.discard(call_id)
            self._health.restore(variables=not self._running and self._instance is None)


def _kill(pids: set[int]) -> None:
    """End processes that a call started and did not wait for."""
    for pid in pids:
        kill_group(pid)
        with suppress(OSError):
            os.waitpid(pid, 0)


def _log_traceback(error: BaseException) -> None:
    with suppress(BaseException):  # formatting calls user code
        sys.stderr.write("".join(traceback.format_exception(error, limit=-8)))
        sys.stderr.flush()


# A tool is careless, not hostile (SECURITY.md). After each call this is put back, so that the next one does not break:
# the working directory and the umask; `sys.stdout` and `sys.stderr`, if they were closed; variables of the environment
# that were there at the worker's birth, unless another call runs, which may have changed them for itself, or the calls
# are one environment's. What calls leak (descriptors, threads, address space) is bounded, measured from the worker's
# birth: a plugin whose import takes much is not replaced for it. Each look costs some microseconds.
#
# Not covered: builtins, modules, limits, new variables, signal handlers, locales, threads that are not Python's.


class Health:
    """Puts a process right after a call, or says why it must be replaced. `threads`: how many run calls."""

    def __init__(self, threads: int) -> None:
        self._folder = os.getcwd()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._environment = dict(os.environ)
        self._most_threads = threading.active_count() + threads + _STRAY_THREADS
        first_free, most = _first_free_descriptor(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._last_descriptor = first_free + min(_SPENT * (most - first_free), _STRAY_DESCRIPTORS)
        mapped, room = _mapped_bytes(), resource.getrlimit(resource.RLIMIT_AS)[0]
        self._most_bytes = None if room == resource.RLIM_INFINITY else mapped + _SPENT * (room - mapped)

    def restore(self, *, variables: bool) -> None:
        """Put back what a call must leave as it was."""
        with suppress(OSError):
            if os.getcwd() != self._folder:
                os.chdir(self._folder)
        os.umask(self._umask)
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name)
            if getattr(stream, "closed", stream is None):
                with suppress(OSError):
                    again = open(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115 - it stays
                    setattr(sys, name, again)
        if variables and not self._environment.items() <= os.environ.items():
            os.environ.update(self._environment)

    def complaint(self) -> str | None:
        """Return what is nearly spent, if anything is."""
        if _first_free_descriptor() >= self._last_descriptor:
            return "its descriptors are nearly spent"
        if threading.active_count() > self._most_threads:
            return "calls left many threads behind"
        if self._most_bytes is not None and _mapped_bytes() > self._most_bytes:
            return "its memory is nearly spent"
        return None


def _first_free_descriptor() -> float:
    """Return the number that the next file gets, the lowest free one.

    The limit is one of numbers.
    """
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return float("inf")
    os.close(descriptor)
    return descriptor


def _mapped_bytes() -> int:
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(descriptor, 4096).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)
