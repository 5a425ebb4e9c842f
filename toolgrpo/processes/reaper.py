"""A small process above a tree of others: nothing of the tree outlives it, however members end.

A kernel without a process namespace or a cgroup of one's own ends no grandchildren: whoever is
killed cannot tidy up. So `fork_under_reaper` leaves a process behind that runs no code but this
page's, and whose child the caller goes on as. All that the caller starts, daemons and new sessions
included, comes down to the reaper when the processes between have ended. It kills everything when

* its child ends, by itself or by `kill -9`;
* the owner ends: a process far above, watched through a descriptor that no fork of it can keep
  open. The child has some seconds to tidy up, then it is killed, whatever it is doing;
* it gets SIGTERM, which it hands on; the child has a second for it.

It ends as its child ended. Not covered: the reaper killed together with its child (each alone is
covered, as the child watches the reaper in turn), and systems other than Linux, where the caller
simply goes on.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from toolgrpo.processes.linux import adopt_orphans, die_with_parent, end_children, name_process, watch_process

_TIDY_UP_MS = 5000
_GRACE_S = 1  # after a SIGTERM


def fork_under_reaper(owner: int) -> None:
    """Go on as a child of a reaper. `owner`: a descriptor from `watch_process`, or -1.

    Until it calls `outlive_parent`, the child is killed when the reaper is.
    """
    if sys.platform != "linux":
        return
    adopt_orphans()
    reaper = os.getpid()
    child = os.fork()
    if child != 0:
        _reap(child, owner)
    die_with_parent(reaper)


def _reap(child: int, owner: int) -> NoReturn:
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: _kill(child))
    signal.signal(signal.SIGTERM, lambda *_: _ask(child))
    name_process("toolgrpo-reaper")
    os.chdir("/")
    ended = watch_process(child)
    _close_all_but({0, 1, 2, owner, ended})
    _wait(child, ended, owner)
    _, status = os.waitpid(child, 0)
    end_children()
    _end_as(os.waitstatus_to_exitcode(status))


def _wait(child: int, ended: int, owner: int) -> None:
    """Wait until the child has ended; help it where the owner ends first."""
    poller = select.poll()
    for descriptor in (ended, owner):
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll()} if ended >= 0 else set()
    if ended >= 0 and ended not in ready:
        poller.unregister(owner)
        poller.poll(_TIDY_UP_MS)
        _kill(child)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the listing's own is closed already
                os.close(int(name))


def _ask(child: int) -> None:
    _kill(child, signal.SIGTERM)
    signal.alarm(_GRACE_S)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_as(code: int) -> NoReturn:
    """End with the exit code, or by the signal, that ended the child."""
    if code < 0:
        with suppress(OSError, ValueError):  # the handler of SIGKILL cannot be set, nor need it be
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
