"""The process that everything sandboxed is forked from. Started by exec with a clean environment; never has threads.

It imports the preloaded libraries once, then forks a worker for each channel the client sends over the control socket,
and ends when that socket closes. Workers die with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

from toolgrpo.sandbox.confine import die_with_parent, enter_namespaces

__all__ = ["main"]


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle; our end is its socket's end
    die_with_parent()
    missing = _preload(settings["preload"])
    from toolgrpo.sandbox import worker  # after the preload: it warms what it needs

    worker.warm(files=settings["rung"] != "seccomp")
    gc.collect()
    gc.freeze()
    control.sendall(json.dumps({"missing": missing}).encode() + b"\n")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)
        _start_worker(settings, socket.socket(fileno=fds[0]), control)


def _preload(names: list[str]) -> list[str]:
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def _start_worker(settings: dict[str, Any], channel: socket.socket, control: socket.socket) -> None:
    if os.fork() != 0:
        channel.close()
        return
    from toolgrpo.sandbox import worker

    try:
        control.close()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if settings["rung"] == "namespaces":
            enter_namespaces()
            inner = os.fork()  # the first process of the new pid namespace: with it, all the others go
            if inner != 0:
                channel.close()
                os.waitpid(inner, 0)
                os._exit(0)
            die_with_parent()
        worker.serve(settings, channel)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)
