"""The parent of all tool workers: a small process that loads the plugin and starts workers.

Why not pebble, loky, anyio or multiprocessing: pebble and anyio run one call per process, so 256
slow calls need 256 processes; loky kills its whole pool at a timeout; all of them unpickle what a
child sends, and none contains what a child forks. And none may fork the trainer, which has threads
and a GPU. So: the trainer starts this process by exec, and it

* imports the plugin file, so that an import that crashes or hangs is not the trainer's;
* forks workers from itself in milliseconds, if the import left it forkable (one thread, no new
  descriptors), or else starts each by exec;
* is the subreaper of everything below it: a process that a tool left behind, double-forked or not,
  becomes its child and is killed within a second. Processes that the plugin's import started are
  left alone;
* kills everything below it when the trainer goes away, however that happens, forks of the trainer
  that live on included;
* has a reaper above it (`confined_python.processes.linux`), which does the same when the supervisor itself is
  killed, alone or with the trainer, or hangs in the plugin's import.

It runs no user code after the import. It speaks frames over one socket: `spawn` (with the worker's
socket attached), `kill` and `secrets` come in, `wants` (before the import), `loaded`, `failed` and
`exited` go out.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from confined_python.processes import linux
from confined_python.processes.wire import FrameReader, pack, receive
from toolgrpo.errors import UserError
from toolgrpo.tools.plugin.plugin_file import Plugin, PluginSource, load_plugin
from toolgrpo.tools.plugin.tool_source import HEAVY, asked_for
from toolgrpo.tools.render import describe_exception
from toolgrpo.tools.workers.tool_worker import PoolOptions, Worker

_MOST_OF_A_SEED = 64  # bits: of one that somebody wrote; numpy draws 128
_PATHS = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
_MAIN = "from toolgrpo.tools.workers.supervisor import main; main(sys.argv)"
# the reaper first, while the process is small: it keeps what is imported before the fork
_REAPER = "from confined_python.processes.linux import fork_under_reaper; fork_under_reaper(int(sys.argv[4])); "
BOOTSTRAP = _PATHS + _REAPER + _MAIN
_WORKER_BOOTSTRAP = _PATHS + _MAIN
_SWEEP_S = 1.0


def main(argv: list[str]) -> None:
    """Run as the supervisor, or as a worker.

    Arguments from argv[1] on: `supervisor PATHS SOCKET_FD TRAINER_FD`, or
    `worker PATHS SOCKET_FD HELLO_FD PARENT`.
    """
    sock = socket.socket(fileno=int(argv[3]))
    os.set_inheritable(sock.fileno(), False)
    if argv[1] == "worker":
        linux.die_with_parent(int(argv[5]))
        with os.fdopen(int(argv[4])) as file:
            hello = json.load(file)
        Worker(sock, _load(hello), PoolOptions(**hello["options"])).serve()
    trainer = int(argv[4])
    if trainer >= 0:
        os.set_inheritable(trainer, False)
    hello = receive(sock)
    if hello is not None:
        Supervisor(sock, hello, trainer).run()


class Supervisor:
    """Starts and ends workers on request until its socket ends."""

    def __init__(self, control: socket.socket, hello: dict[str, Any], trainer: int) -> None:
        self._control = control
        # while these live so does this process: the trainer, and the reaper, its parent
        self._watched = [fd for fd in (trainer, linux.watch_process(os.getppid())) if fd >= 0]
        self._hello = hello
        self._options = PoolOptions(**hello["options"])
        self._plugin = Plugin()
        self._forkable = False
        self._workers: dict[int, int] = {}  # pid -> number
        self._left_alone: set[int] = set()
        self._wakeup: tuple[int, int] = os.pipe()
        self._sockets: list[int] = []  # received, not yet claimed by a spawn

    def run(self) -> None:
        linux.adopt_orphans()
        linux.offer_to_oom_killer(500)
        # what the import opens is held by every fork, so then workers are started by exec
        before = linux.open_descriptors()
        try:
            self._ask_for_secrets()
            started = time.monotonic()
            self._plugin = _load(self._hello)
            import_s = time.monotonic() - started
        except UserError as error:
            self._send({"op": "failed", "message": str(error)})
            return
        except BaseException as error:  # the plugin's own code may raise anything while it is looked at
            self._send({"op": "failed", "message": f"loading failed: {describe_exception(error)}"})
            return
        linux.outlive_parent()  # from here on there is tidying to do when it ends
        self._forkable = linux.forkable(before)
        # a plugin may start a server when it is imported, for all its calls
        self._left_alone = set(linux.children())
        self._listen_for_ended_children()
        # a collection in a worker would write to pages that all share, and copy them
        gc.collect()
        gc.freeze()
        spec = replace(self._plugin.spec, import_s=import_s, heavy_imports=tuple(HEAVY & sys.modules.keys()))
        self._send({"op": "loaded", "plugin": asdict(spec)})
        try:
            self._serve()
        finally:
            for pid in (*self._workers, *self._left_alone):
                linux.kill_group(pid)
            linux.end_children()

    def _serve(self) -> None:
        reader = FrameReader()
        control = self._control.fileno()
        while True:
            ready, _, _ = select.select([control, self._wakeup[0], *self._watched], [], [], _SWEEP_S)
            if not set(self._watched).isdisjoint(ready):
                return
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
                    linux.kill_group(pid)
            return
        descriptor = self._sockets.pop(0)
        pid = self._fork(descriptor) if self._forkable else self._exec(descriptor)
        os.close(descriptor)
        self._workers[pid] = number

    def _fork(self, descriptor: int) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                # a group of its own, so that killing it takes what its tools have started
                os.setsid()
                # the pipe is the supervisor's: a child that ends in the worker must not wake it
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                linux.die_with_parent(supervisor)
                self._control.close()
                for other in (*self._wakeup, *self._sockets, *self._watched):
                    os.close(other)
                _reseed(self._plugin)
                Worker(socket.socket(fileno=descriptor), self._plugin, self._options).serve()
            finally:
                os._exit(1)
        return pid

    def _exec(self, descriptor: int) -> int:
        with tempfile.TemporaryFile("w+") as file:
            json.dump(self._hello, file)
            file.seek(0)
            numbers = map(str, (descriptor, file.fileno(), os.getpid()))
            command = [sys.executable, "-c", _WORKER_BOOTSTRAP, "worker", json.dumps(sys.path), *numbers]
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(descriptor, file.fileno()), start_new_session=True
            )
        child.returncode = 0  # reaped below by pid; keeps Popen from waiting for it
        return child.pid

    def _reap(self) -> None:
        """Reap what has ended, and report the workers among it."""
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
        for pid in linux.children():
            if pid not in self._workers and pid not in self._left_alone:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _ask_for_secrets(self) -> None:
        """Get the withheld variables that the plugin asks for, before it is imported."""
        wanted = {name for source in _sources(self._hello) if source is not None for name in asked_for(source)}
        if wanted.isdisjoint(self._hello["withheld"]):
            return
        self._send({"op": "wants", "names": sorted(wanted)})
        answer = receive(self._control)
        if answer is not None:
            os.environ.update(answer["variables"])

    def _listen_for_ended_children(self) -> None:
        for descriptor in self._wakeup:
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the trainer is gone; the next read says so
            self._control.sendall(pack(message))


def _sources(hello: dict[str, Any]) -> tuple[PluginSource | None, PluginSource | None]:
    """Return where the tools and the environment come from."""
    tools, environment = hello["tools"], hello["environment"]
    return tools and PluginSource(**tools), environment and PluginSource(**environment)


_unseeded: list[random.Random] = []  # that were made while the tools were imported


def _load(hello: dict[str, Any]) -> Plugin:
    """Import the tools; generators that they make without a seed are noted."""
    with_seed = random.Random.__init__

    def noting(made: random.Random, x: Any = None) -> None:
        with_seed(made, x)
        if x is None:
            _unseeded.append(made)

    random.Random.__init__ = noting  # type: ignore[method-assign,assignment]
    try:
        return load_plugin(*_sources(hello))
    finally:
        random.Random.__init__ = with_seed  # type: ignore[method-assign]


def _reseed(plugin: Plugin) -> None:
    """Give a forked worker random streams of its own: numpy's, and those that the tools' files made without a seed.

    The standard library's reseeds itself.
    """
    for made in _unseeded:
        made.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return
    numpy_random.seed()
    for value in _made_at_import(plugin):
        if issubclass(type(value), numpy_random.Generator):
            entropy = getattr(getattr(value.bit_generator, "seed_seq", None), "entropy", None)
            if isinstance(entropy, int) and entropy.bit_length() > _MOST_OF_A_SEED:
                value.bit_generator.state = type(value.bit_generator)().state


def _made_at_import(plugin: Plugin) -> Iterator[Any]:
    """Yield the globals of the tools' files, and the attributes of their classes."""
    owners: list[Any] = [tool.function for tool in plugin.functions.values()]
    if plugin.environment is not None:
        owners += [plugin.environment.factory, *(tool.function for tool in plugin.environment.tools.values())]
    namespaces = (getattr(getattr(owner, "__func__", owner), "__globals__", None) for owner in owners)
    for namespace in {id(one): one for one in namespaces if isinstance(one, dict)}.values():
        for value in list(namespace.values()):
            yield value
            if isinstance(value, type) and value.__module__ == namespace.get("__name__"):
                yield from list(vars(value).values())
