"""The parent of all tool workers: a small process that loads the plugin, starts workers, and buries them.

Why not pebble, loky, anyio or multiprocessing: pebble and anyio run one call per process, so 256 slow calls need 256
processes; loky kills its whole pool at a timeout; all of them unpickle what a child sends, and none contains what a child
forks. And none may fork the trainer, which has threads and a GPU. So: the trainer starts this process by exec, and it

* imports the plugin file, so that an import that crashes or hangs is not the trainer's;
* forks workers from itself in milliseconds, if the import left it forkable (one thread, no new descriptors), or else
  starts each by exec;
* is the subreaper of everything below it: a process that a tool left behind, double-forked or not, becomes its child and
  is killed within a second. Processes that the plugin's import started are left alone;
* kills everything below it when the trainer goes away, however that happens.

It runs no user code after the import. It speaks frames over one socket: `spawn` (with the worker's socket attached) and
`kill` come in, `loaded`, `failed` and `exited` go out.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from toolgrpo.errors import UserError
from toolgrpo.tools import process
from toolgrpo.tools.plugin.loaded_plugin import Plugin, load_plugin
from toolgrpo.tools.plugin.plugin_file import Source
from toolgrpo.tools.render import describe_exception
from toolgrpo.tools.wire import FrameReader, pack, read_frame
from toolgrpo.tools.workers.tool_worker import Limits, Worker

__all__ = ["BOOTSTRAP", "main"]

BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from toolgrpo.tools.workers.supervisor import main; main(sys.argv)"
_SWEEP_S = 1.0


def main(argv: list[str]) -> None:
    """`supervisor PATHS SOCKET_FD`, or `worker PATHS SOCKET_FD HELLO_FD`; the first is argv[1]."""
    sock = socket.socket(fileno=int(argv[3]))
    os.set_inheritable(sock.fileno(), False)
    if argv[1] == "worker":
        process.die_with_parent()
        with os.fdopen(int(argv[4])) as file:
            hello = json.load(file)
        Worker(sock, _load(hello), Limits(**hello["limits"])).serve()
    hello = read_frame(sock)
    if hello is not None:
        Supervisor(sock, hello).run()


class Supervisor:
    """Starts and ends workers on request until its socket ends."""

    def __init__(self, control: socket.socket, hello: dict[str, Any]) -> None:
        self._control = control
        self._hello = hello
        self._limits = Limits(**hello["limits"])
        self._plugin = Plugin()
        self._forkable = False
        self._workers: dict[int, int] = {}  # pid -> number
        self._left_alone: set[int] = set()
        self._wakeup: tuple[int, int] = os.pipe()
        self._sockets: list[int] = []  # received, not yet claimed by a spawn

    def run(self) -> None:
        process.adopt_orphans()
        process.first_to_be_killed(500)
        process.die_with_parent()  # the import may hang and not see the trainer go
        before = process.open_descriptors()
        try:
            self._plugin = _load(self._hello)
        except UserError as error:
            self._send({"op": "failed", "message": str(error)})
            return
        except BaseException as error:  # the plugin's own code may raise anything while it is looked at
            self._send({"op": "failed", "message": f"loading failed: {describe_exception(error)}"})
            return
        process.die_with_parent(False)  # from here on the end of the socket says so, and there is tidying to do
        self._forkable = process.forkable(before)
        self._left_alone = set(process.children())
        self._listen_for_ended_children()
        gc.collect()
        gc.freeze()
        self._send({"op": "loaded", "plugin": self._plugin.spec.to_json(), "forkable": self._forkable})
        try:
            self._serve()
        finally:
            self._kill_everything()

    def _serve(self) -> None:
        reader = FrameReader()
        control = self._control.fileno()
        while True:
            ready, _, _ = select.select([control, self._wakeup[0]], [], [], _SWEEP_S)
            if self._wakeup[0] in ready:
                os.read(self._wakeup[0], 4096)
            self._reap()
            if control in ready:
                chunk, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
                if not chunk:
                    return
                self._sockets += descriptors
                for message in reader.feed(chunk):
                    self._obey(message)
            self._sweep()

    def _obey(self, message: dict[str, Any]) -> None:
        number = message["worker"]
        if message["op"] == "kill":
            for pid, known in self._workers.items():
                if known == number:
                    process.kill_group(pid)
            return
        descriptor = self._sockets.pop(0)
        pid = self._fork(descriptor) if self._forkable else self._exec(descriptor)
        os.close(descriptor)
        self._workers[pid] = number

    def _fork(self, descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                process.die_with_parent()
                self._control.close()
                for other in (*self._wakeup, *self._sockets):
                    os.close(other)
                _reseed()
                Worker(socket.socket(fileno=descriptor), self._plugin, self._limits).serve()
            finally:
                os._exit(1)
        return pid

    def _exec(self, descriptor: int) -> int:
        with tempfile.TemporaryFile("w+") as file:
            json.dump(self._hello, file)
            file.seek(0)
            command = [
                sys.executable,
                "-c",
                BOOTSTRAP,
                "worker",
                json.dumps(sys.path),
                str(descriptor),
                str(file.fileno()),
            ]
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(descriptor, file.fileno()), start_new_session=True
            )
        child.returncode = 0  # reaped below by pid; keeps Popen from waiting for it
        return child.pid

    def _reap(self) -> None:
        """Report workers that ended, bury everything else that did."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._workers.pop(pid, None)
            if number is not None:
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                self._send({"op": "exited", "worker": number, "status": os.waitstatus_to_exitcode(status)})

    def _sweep(self) -> None:
        """Kill what no living worker answers for: orphans that ended up here."""
        for pid in process.children():
            if pid not in self._workers and pid not in self._left_alone:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _kill_everything(self) -> None:
        for pid in (*self._workers, *self._left_alone):
            process.kill_group(pid)
        self._workers.clear()
        self._left_alone.clear()
        while remaining := process.children():
            for pid in remaining:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _listen_for_ended_children(self) -> None:
        for descriptor in self._wakeup:
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the trainer is gone; the next read says so
            self._control.sendall(pack(message))


def _load(hello: dict[str, Any]) -> Plugin:
    sources = [None if record is None else Source(**record) for record in (hello["tools"], hello["environment"])]
    return load_plugin(*sources)


def _reseed() -> None:
    """Forked siblings must not share numpy's random stream; the standard library's reseeds itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
