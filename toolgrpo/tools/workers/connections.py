"""The pool's two kinds of connection: to the supervisor, with its process, and to one worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter

from confined_python.processes.linux import kill_marked, watch_process
from confined_python.processes.wire import FrameReader, WireError, pack
from toolgrpo.errors import PluginError, ToolExecutorError
from toolgrpo.support.plain_text import is_secret_variable
from toolgrpo.tools.plugin.plugin_file import PluginSource, PluginSpec
from toolgrpo.tools.plugin.tool_source import withheld_hint
from toolgrpo.tools.workers.output_log import OutputLog
from toolgrpo.tools.workers.supervisor import BOOTSTRAP

# what keeps many processes and threads small, where the user says nothing else
_DEFAULTS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "4", "PYTHONUNBUFFERED": "1"}
_TIDY_UP_S = 3.0


class WorkerLink(asyncio.Protocol):
    """Frames to and from one worker over `sock`. What is no frame ends the connection."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[dict[str, Any]], None], on_hung_up: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_hung_up = on_hung_up
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def finish(self) -> None:
        """Read what the worker has said, let it say no more, and close.

        In this order, what it announced is known exactly: a worker that announces a call from now
        on fails to, and ends.
        """
        self._on_hung_up = lambda: None
        with suppress(OSError):  # the worker has closed it
            self._sock.shutdown(socket.SHUT_RDWR)
        self._read_rest()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._on_hung_up = lambda: None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._on_message(_checked(message))
        except WireError:
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_rest()  # a write that failed ends a transport without reading what had come; the socket is still open here
        self._on_hung_up()

    def _read_rest(self) -> None:
        with suppress(OSError, WireError):  # what a tool wrote there may be anything
            while chunk := self._sock.recv(1 << 18, socket.MSG_DONTWAIT):
                for message in self._reader.feed(chunk):
                    self._on_message(_checked(message))


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are numbers and whose reason is text; a tool may have written any other."""
    numbers = (message[name] for name in ("begun", "returned", "id") if name in message)
    if any(type(number) is not int for number in numbers) or not isinstance(message.get("retire"), str | None):
        raise WireError("a frame has no number where that of a call was expected")
    return message


class SupervisorLink:
    """The supervisor's process, its control socket, and the pipe of everything that tools print."""

    def __init__(self, hello: Mapping[str, Any], log: OutputLog) -> None:
        surroundings = {**_DEFAULTS, **os.environ}
        self._withheld = {name: value for name, value in surroundings.items() if is_secret_variable(name)}
        self._sources = hello["tools"], hello["environment"]
        self._hello = {**hello, "withheld": sorted(self._withheld)}
        self._log = log
        self._mark = f"TOOLGRPO_TREE_{uuid.uuid4().hex}"  # in the environment of all that is below it
        self.serving = False  # from when the plugin is loaded until its process is gone
        self.was_killed = False  # while it imported the plugin, which an import does not do to itself
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._pending: deque[tuple[bytes, socket.socket | None]] = deque()
        self._loaded: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._on_exited: Callable[[int, int], None] = lambda number, status: None
        self._on_lost: Callable[[], None] = lambda: None
        self._control, theirs = socket.socketpair()
        self._output, output_theirs = os.pipe()
        os.set_blocking(self._output, False)
        owner = watch_process(os.getpid())
        shared = [str(theirs.fileno()), str(owner)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, "supervisor", json.dumps(sys.path), *shared],
                stdin=subprocess.DEVNULL,
                stdout=output_theirs,
                stderr=output_theirs,
                pass_fds=[fd for fd in (theirs.fileno(), owner) if fd >= 0],
                cwd=hello["folder"],
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer
                env={
                    **{name: value for name, value in surroundings.items() if name not in self._withheld},
                    self._mark: "1",
                },
            )
        except OSError as error:
            raise ToolExecutorError(f"the tool workers cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(output_theirs)
            if owner >= 0:
                os.close(owner)
        self._loop.add_reader(self._output, self._drain)

    async def start(
        self, timeout_s: float, *, on_exited: Callable[[int, int], None], on_lost: Callable[[], None]
    ) -> PluginSpec:
        """Let it load the plugin; PluginError if the plugin cannot be used."""
        with suppress(OSError):  # it may end at once; the reader below notices
            self._control.sendall(pack(self._hello))
        # blocking until here: the hello may be larger than the socket's buffer
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._read)
        label = " and ".join(PluginSource(**source).label for source in self._sources if source)
        try:
            message = await asyncio.wait_for(self._loaded, timeout_s)
        except TimeoutError:
            await self.stop()
            raise PluginError(
                f"{label} did not finish importing within {timeout_s:g} s. "
                "Do slow work inside the tools, or under `if __name__ == '__main__'`, not while the file is imported."
            ) from None
        if message["op"] == "failed":
            await self.stop()
            raise PluginError(message["message"] + withheld_hint(message["message"], self._withheld))
        if message["op"] != "loaded" or self._control.fileno() < 0:  # or it was, and is gone already
            await self.stop()
            self.was_killed = self._process.returncode == -signal.SIGKILL
            raise PluginError(
                f"importing {label} ended the process it ran in (exit status {self._process.returncode}). "
                f"The last that was printed there:\n{self._log.tail}"
            )
        self._on_exited, self._on_lost, self.serving = on_exited, on_lost, True
        return TypeAdapter(PluginSpec).validate_python(message["plugin"])

    def spawn(self, number: int, sock: socket.socket) -> None:
        """Ask for a worker on `sock`, which is the worker's from here on."""
        self._post({"op": "spawn", "worker": number}, sock)

    def kill(self, number: int) -> None:
        self._post({"op": "kill", "worker": number}, None)

    def _post(self, message: Mapping[str, Any], sock: socket.socket | None) -> None:
        """Send in order, when there is room.

        If the supervisor is gone, its workers are too and nothing is to be sent.
        """
        # never around the queue: a `kill` that overtook its `spawn` would leave the worker running
        self._pending.append((pack(message), sock))
        self._flush()

    def _flush(self) -> None:
        while self._pending and self._control.fileno() >= 0:
            frame, sock = self._pending[0]
            try:
                socket.send_fds(self._control, [frame], [] if sock is None else [sock.fileno()])
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError:
                break
            # only now: until it was sent, the supervisor has no copy of the socket
            self._pending.popleft()
            if sock is not None:
                sock.close()
        if self._control.fileno() >= 0:
            self._loop.remove_writer(self._control.fileno())

    async def stop(self) -> None:
        """End it and everything below it, and wait until they are gone. Safe to call twice."""
        # it ends because we ask for it; nobody is to start another
        self._on_lost = lambda: None
        self._hang_up()
        if not self._loaded.done():
            self._loaded.set_result({"op": "gone"})
            self._terminate()  # it imports the plugin, and does not listen
        if not await self._ended_within(_TIDY_UP_S):
            self._terminate()
        if not await self._ended_within(_TIDY_UP_S):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        kill_marked(self._mark)  # the supervisor and its reaper may have been killed together
        if self._output >= 0:
            self._drain()
            if self._output >= 0:
                self._close_output()

    def _terminate(self) -> None:
        """Let the reaper above it end everything."""
        if self._process.poll() is None:
            self._process.terminate()

    async def _ended_within(self, seconds: float) -> bool:
        deadline = self._loop.time() + seconds
        while self._process.poll() is None and self._loop.time() < deadline:
            await asyncio.sleep(0.005)
        return self._process.poll() is not None

    def _read(self) -> None:
        try:
            chunk = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        try:
            for message in self._reader.feed(chunk):
                if message["op"] == "exited":
                    self._on_exited(message["worker"], message["status"])
                elif message["op"] == "wants":
                    known = {name: self._withheld[name] for name in message["names"] if name in self._withheld}
                    self._post({"op": "secrets", "variables": known}, None)
                elif not self._loaded.done():
                    self._loaded.set_result(message)
        except WireError:
            chunk = b""
        if not chunk:
            self._hang_up()
            if not self._loaded.done():
                self._loaded.set_result({"op": "gone"})
            self._on_lost()

    def _hang_up(self) -> None:
        self.serving = False
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._loop.remove_writer(self._control.fileno())
            self._control.close()
        while self._pending:
            _, sock = self._pending.popleft()
            if sock is not None:
                sock.close()

    def _drain(self) -> None:
        if not self._log.drain(self._output):
            self._close_output()

    def _close_output(self) -> None:
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._output = -1
