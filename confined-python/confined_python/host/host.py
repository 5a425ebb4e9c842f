"""The process that everything sandboxed is forked from. Started by exec with a clean environment;
never has threads.

It reads no request: what is forked from it knows nothing but what the client opened the sandbox
with.

It imports the preloaded libraries once, leaves the machine's network once, then forks a worker for
each channel that the client sends over the control socket. It owns the scratch folder: when the
client closes the socket or dies, however it dies, the host kills the workers, removes the folder
and ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from confined_python.base import Rung
from confined_python.host import scratch
from confined_python.host.confine import leave_network
from confined_python.host.run_process import mapped_now
from confined_python.processes.linux import adopt_orphans, die_with_parent

# the interpreter rewrites code that it runs often: better once here than in a copy of the page each time
_WARM_UPS = 50
_HUGE, _MADV_COLLAPSE = 2 << 20, 25
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def main() -> None:
    settings = json.loads(sys.argv.pop())  # programs see no arguments
    for name in ("control", "owner", "proc", "vmstat"):
        settings[name] = _renumbered_low(settings[name])
    control, owner = socket.socket(fileno=settings["control"]), settings["owner"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    adopt_orphans()
    if settings["rung"] == Rung.NAMESPACES:
        leave_network()
    # Before the preload, so that what runs touch lies together, and the libraries that most never
    # touch stay whole.
    from confined_python.host import forker, run_worker
    from confined_python.inside import cells

    _ = run_worker
    forker.warm(settings["rung"])
    for name in settings["preload"]:
        with suppress(ImportError):  # not installed here
            importlib.import_module(name)
    os.environ.clear()  # what is left is what code sees
    os.environ.update(PATH="", LANG="C.UTF-8")
    for _ in range(_WARM_UPS):
        cells.warm_up()
    gc.collect()
    gc.freeze()
    _collapse_heap()
    settings["mapped_bytes"] = mapped_now()
    settings["scratch"], lock = scratch.claim(settings["tmp"])
    os.chmod(settings["scratch"], 0o711)  # each run's folder inside it is its own
    workers: dict[int, int] = {}
    try:
        control.sendall(json.dumps(settings["scratch"]).encode() + b"\n")
        _start_workers(settings, control, [fd for fd in (owner, lock) if fd is not None], workers)
    finally:
        _end_all(list(workers))
        scratch.remove(settings["scratch"])
        os._exit(0)


def _renumbered_low(fd: int | None) -> int | None:
    """Move a descriptor to the lowest free number.

    Processes that confine themselves close all up to some number.
    """
    if fd is None:
        return None
    low = os.dup(fd)
    os.close(fd)
    return low


def _collapse_heap() -> None:
    """Merge this process's heap into huge pages, where the kernel is 6.1 or newer.

    With numpy and sympy imported this halves what a fork and its end cost: mostly copying and dropping page tables.
    """
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, rights, *rest = line.split()
        if rights == "rw-p" and (len(rest) < 4 or rest[3] == "[heap]"):
            first, last = (int(edge, 16) for edge in span.split("-"))
            for address in range(-(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE, _HUGE):
                _libc.madvise(address, _HUGE, _MADV_COLLAPSE)


def _start_workers(
    settings: dict[str, Any], control: socket.socket, own_fds: list[int], workers: dict[int, int]
) -> None:
    """Start one worker per message, until the client is gone.

    `workers`: pid by pidfd. `own_fds`: the host's, closed in its workers; the owner's pidfd first.
    """
    owner = own_fds[0]
    poller = select.poll()
    for fd in (control.fileno(), owner):
        poller.register(fd, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == owner:
                return
            if fd != control.fileno():  # a worker has ended
                poller.unregister(fd)
                os.close(fd)
                scratch.remove_of(workers.pop(fd), settings["scratch"])
                continue
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            pid = _start_worker(settings, socket.socket(fileno=fds[0]), [control.fileno(), *own_fds, *workers])
            pidfd = os.pidfd_open(pid)
            workers[pidfd] = pid
            poller.register(pidfd, select.POLLIN)


def _start_worker(settings: dict[str, Any], channel: socket.socket, not_its_own: list[int]) -> int:
    pid = os.fork()
    if pid != 0:
        channel.close()
        return pid
    from confined_python.host import run_worker
    from confined_python.host.forker import ForkLauncher

    try:
        for fd in not_its_own:
            os.close(fd)
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_worker.serve(ForkLauncher(settings, channel), channel, settings["scratch"], settings["limits"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _end_all(pidfds: list[int]) -> None:
    """Kill the workers, and with them all they started, and wait until everything is gone."""
    for pidfd in pidfds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
