"""Tries one rung on itself and ends with 0 only if what it should stop is stopped.

Runs in a throw-away process.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile

from toolgrpo.sandbox.rungs.confine import (
    SyscallRules,
    confine_files,
    confine_syscalls,
    enter_pid_namespace,
    file_rules,
    leave_network,
)
from toolgrpo.sandbox.rungs.syscalls import syscall_filter


def probe_rung() -> None:
    rung = sys.argv[1]
    scratch = tempfile.mkdtemp()
    try:
        if rung == "namespaces":
            leave_network()
            enter_pid_namespace()
        pid = os.fork()
        if pid == 0:
            try:
                _try(rung, scratch)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        os.rmdir(scratch)


def _try(rung: str, scratch: str) -> None:
    outside = "/proc/self/environ"
    rules = syscall_filter(files=rung != "seccomp")
    if rung != "seccomp":
        confine_files(file_rules([], scratch))
        _must_fail("Landlock let a file outside be read", lambda: open(outside).close())
    confine_syscalls(SyscallRules(rules))
    _must_fail("seccomp let a socket be made", lambda: socket.socket().close())
    _must_fail("seccomp let another process be signalled", lambda: os.kill(os.getppid(), 0))
    _must_fail("a file outside could be read", lambda: open(outside).close())


def _must_fail(said: str, attempt: object) -> None:
    try:
        attempt()  # type: ignore[operator] # a lambda of ours
    except OSError:
        return
    raise RuntimeError(said)
