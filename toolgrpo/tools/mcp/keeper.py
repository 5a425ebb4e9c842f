"""Runs the command of an MCP server, and ends with it all that it started.

Started as `python -I -S keeper.py PARENT COMMAND [ARGUMENT...]`, with the server's pipes, which
it hands on. When the server ends by itself, when this process gets a SIGTERM, or when the trainer
(the process PARENT) ends in whatever way, the server and everything it has started are killed, also
what left its process group. The standard library only: it must be there in some milliseconds.

Not covered off Linux: what left the process group, and a trainer that was killed (a sound server
ends with its stdin).
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0  # from the SIGTERM of a server to its SIGKILL
LIMIT_S = 5.0  # for processes that start others as quickly as they are killed


class ToldToEnd(Exception):
    """A SIGTERM came."""


def main() -> int:
    """Keep the server until it ends, or until the one SIGTERM that is heard."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, on_sigterm)
    control(PR_SET_CHILD_SUBREAPER, 1)
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    server = os.fork()
    if server == 0:
        exec_server(command)
    os.close(0)  # the server's end of its pipes must be the only one
    os.close(1)
    try:
        return os.waitstatus_to_exitcode(wait_for(server))
    except ToldToEnd:
        ask(server)
        return 1
    finally:
        if sys.platform != "linux":
            with suppress(OSError):
                os.killpg(server, signal.SIGKILL)


def exec_server(command: list[str]) -> None:
    """Be the server; never return."""
    keeper = os.getppid()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setpgid(0, 0)
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]!r}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def wait_for(server: int) -> int:
    """Reap whatever ends, until it is the server."""
    while True:
        pid, status = os.wait()
        if pid == server:
            return status


def ask(server: int) -> None:
    """Tell the server's group to end, and give it a moment."""
    with suppress(OSError):
        os.killpg(server, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):
            if os.waitpid(server, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
                continue
        return


def end_all() -> None:
    """Kill all children; their children become ours, so that none is left when we have none."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def on_sigterm(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise ToldToEnd


if __name__ == "__main__":
    try:
        status = main()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ToldToEnd:  # it is raised once at most
        status = 1
    end_all()
    os._exit(status & 0xFF)
