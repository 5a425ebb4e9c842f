"""Linux calls that keep a process and its descendants under control, and a reaper above them. Elsewhere
each does nothing.

Not covered: `die_with_parent` follows the thread that forked, and is not inherited by what the
process forks; off Linux, a tool's children that leave their process group outlive it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_CLONE_FS = 0x200
_LEAVING_S = 0.2  # a thread that was joined, or a process that was killed, is listed for a moment longer
_TIDY_UP_MS = 5000
_GRACE_S = 1  # after a SIGTERM
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, not of init."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent ends; at once where `parent` has ended already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it ended before the kernel was told to watch it
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    prctl(_PR_SET_PDEATHSIG, 0)


def name_process(name: str) -> None:
    """Set the name that `ps` and `pkill` see, of 15 characters at most."""
    if _LINUX:
        _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()), 0, 0, 0)


def watch_process(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 where there is none."""
    if not _LINUX or not hasattr(os, "pidfd_open"):
        return -1
    with suppress(OSError):
        return os.pidfd_open(pid)
    return -1


def own_directory_per_thread() -> bool:
    """Give the calling thread a working directory and umask of its own; True if that worked."""
    return _LINUX and _libc.unshare(_CLONE_FS) == 0


def offer_to_oom_killer(score: int) -> None:
    """Have the kernel kill this process before others when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def limit_memory(megabytes: int) -> None:
    """Set an address-space limit (0: none), where the system takes one: macOS refuses it. Allow no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes > 0:
        with nullcontext() if _LINUX else suppress(OSError, ValueError):  # Python's name for EINVAL is ValueError
            limit(resource.RLIMIT_AS, megabytes << 20)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, or leave the lower one that it has."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def kill_group(pid: int) -> None:
    """Kill a process and its group."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def open_descriptors() -> set[int]:
    """Return the descriptors that are open, without the standard three."""
    return {int(name) for name in _entries("/proc/self/fd") if int(name) > 2}


def forkable(descriptors_before: set[int]) -> bool:
    """Return whether this process may be forked safely.

    It may with one thread, and nothing opened since `descriptors_before`.
    """
    if not _LINUX or not _is_one_thread():
        return False
    opened = open_descriptors() - descriptors_before
    return not any(os.path.lexists(f"/proc/self/fd/{fd}") for fd in opened)  # the listing's own is closed by now


def _is_one_thread() -> bool:
    give_up = time.monotonic() + _LEAVING_S
    while len(_entries("/proc/self/task")) != 1:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True


def children(thread_id: int | None = None) -> list[int]:
    """Return the ids of this process's children, or of those that one of its threads started."""
    found: list[int] = []
    tasks = [str(thread_id)] if thread_id is not None else _entries("/proc/self/task")
    for task in tasks:
        with suppress(OSError):
            found += [int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()]
    return found


def end_children() -> None:
    """Kill all children; theirs become ours where orphans are adopted, so that none is left in the end."""
    while remaining := children():
        for pid in remaining:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def kill_marked(variable: str) -> None:
    """Kill the processes of this user that were started with this environment variable.

    For those that no parent answers for.
    """
    mark = f"{variable}=".encode()
    give_up = time.monotonic() + _LEAVING_S
    while _kill_marked_once(mark) and time.monotonic() < give_up:
        time.sleep(0.002)


def _kill_marked_once(mark: bytes) -> bool:
    """Return whether to look again: one was killed that may just have started another, or one shows nothing yet."""
    again = False
    for name in _entries("/proc"):
        with suppress(OSError, ValueError):  # no process, another user's, or one that has ended
            environment = Path(f"/proc/{name}/environ").read_bytes()
            if mark in environment and int(name) != os.getpid():
                os.kill(int(name), signal.SIGKILL)
                again = True
            elif not environment and os.readlink(f"/proc/{name}/exe"):
                # `exec` lets its caller go on before the new program has its environment; the 51st field is its end.
                again |= Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[48] == "0"
    return again


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def prctl(option: int, value: int) -> None:
    """Set an option of this process; OSError where the kernel refuses it."""
    if _LINUX and _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


# A small process above a tree of others: nothing of the tree outlives it, however members end.
#
# A kernel without a process namespace or a cgroup of one's own ends no grandchildren: whoever is
# killed cannot tidy up. So `fork_under_reaper` leaves a process behind that runs no code but this
# page's, and whose child the caller goes on as. All that the caller starts, daemons and new sessions
# included, comes down to the reaper when the processes between have ended. It kills everything when
#
# * its child ends, by itself or by `kill -9`;
# * the owner ends: a process far above, watched through a descriptor that no fork of it can keep
#   open. The child has some seconds to tidy up, then it is killed, whatever it is doing;
# * it gets SIGTERM, which it hands on; the child has a second for it.
#
# It ends as its child ended. Not covered: the reaper killed together with its child (each alone is
# covered, as the child watches the reaper in turn), and systems other than Linux, where the caller
# simply goes on.


def fork_under_reaper(owner: int) -> None:
    """Go on as a child of a reaper. `owner`: a descriptor from `watch_process`, or -1.

    Until it calls `outlive_parent`, the child is killed when the reaper is.
    """
    if not _LINUX:
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
    name_process("python-reaper")
    os.chdir("/")
    ended = watch_process(child)
    for descriptor in open_descriptors() - {owner, ended}:
        with suppress(OSError):  # the listing's own is closed already
            os.close(descriptor)
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
