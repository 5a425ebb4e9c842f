"""A process that runs code, as its worker holds it, and what it uses that no limit of the kernel bounds.

Invariant: `ended` can be read as soon as the process has ended, and not before; nothing that its
code does to its own descriptors changes that.
Threads and files that have lost their names are read from /proc, through a descriptor that the client
has opened: a worker in a pid namespace of its own still sees there the process that a pidfd names.
Where /proc does not tell (root in a container may not look at other users' processes), they count
nothing.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

from confined_python.host.scratch import make

_UNLINKED = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+) (\d+) +/(?!dev/zero |SYSV).* \(deleted\)$", re.MULTILINE)


class Launcher(ABC):
    """Starts and ends the processes of a worker; `pid` is the number that it knows one by."""

    def prepare_scratch(self, path: str) -> None:
        """Make a scratch folder, and what binds a process to it.

        Once for all the processes that use the folder after each other.
        """
        make(path, owner=None)

    @abstractmethod
    def start(self, path: str, limits: dict[str, int]) -> Process:
        """Start a process that waits for code in a prepared folder, with the limits it is born with."""

    @abstractmethod
    def kill(self, pid: int) -> None:
        """End the run: after this nothing of it executes any more."""

    @abstractmethod
    def reap(self, pid: int) -> int:
        """Wait for a process that has ended or was killed; return its exit code, negative for a signal."""

    def cpu_seconds(self, pid: int) -> float:
        """Return the CPU time of all threads so far; 0.0 where the process limits its own."""
        return 0.0

    def was_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process for want of memory since the last call."""
        return False


@dataclass(slots=True)
class Process:
    """A process and our ends of its pipes; `pid` is -1 once it was waited for.

    `proc`: /proc, opened, where the process can be looked at there and `ended` is its pidfd.
    """

    launcher: Launcher
    pid: int
    ended: int
    stdin: int
    stdout: int
    stderr: int
    requests: int
    results: int
    proc: int | None = field(default=None, kw_only=True)
    stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for fd in (self.stdin, self.stdout, self.stderr, self.requests, self.results):
            os.set_blocking(fd, False)

    def cpu_seconds(self) -> float:
        return self.launcher.cpu_seconds(self.pid)

    def reap(self) -> int:
        pid, self.pid = self.pid, -1
        return self.launcher.reap(pid)

    def kill(self) -> None:
        if self.pid > 0:
            self.launcher.kill(self.pid)

    def threads(self) -> int:
        """Return how many threads it has; 0 where it has ended or cannot be seen."""
        return 0 if self.proc is None else int(_after(_read(self.proc, f"{self._seen()}/status"), b"Threads:") or 0)

    def unlinked_bytes(self, most_each: int) -> int:
        """Return the size of the files that it holds, open or mapped, and that no folder names any more.

        A mapped one whose size only root could see counts `most_each`, the most that a file may have.
        """
        if self.proc is None:
            return 0
        pid = self._seen()
        sizes: dict[tuple[int, int], int] = {}
        with suppress(OSError):
            folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
            try:
                for name in os.listdir(folder):
                    with suppress(OSError):  # closed meanwhile
                        _add(sizes, os.stat(name, dir_fd=folder))
            finally:
                os.close(folder)
        for span, device, inode in _UNLINKED.findall(_read(self.proc, f"{pid}/maps")):
            try:
                _add(sizes, os.stat(f"{pid}/map_files/{span.decode()}", dir_fd=self.proc))
            except OSError:
                major, minor = device.split(b":")
                sizes.setdefault((os.makedev(int(major, 16), int(minor, 16)), int(inode)), most_each)
        return sum(sizes.values())

    def _seen(self) -> int:
        """Return the number that it has in `proc`; -1 where it has none."""
        assert self.proc is not None
        return int(_after(_read(self.proc, f"self/fdinfo/{self.ended}"), b"Pid:") or -1)

    def is_dead(self) -> bool:
        return bool(select.select([self.ended], [], [], 0)[0])

    def stop(self) -> None:
        """Let it rest, its threads too, until `go_on`; not where it has to see by itself that its host ends."""
        self._signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self.stopped = False

    def _signal(self, number: signal.Signals) -> None:
        if self.proc is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(self.ended, number)

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def release(self) -> None:
        """Wait for the end of a killed process and close what we hold of it."""
        if self.pid > 0:
            self.reap()
        self.close_stdin()
        for fd in (self.ended, self.stdout, self.stderr, self.requests, self.results):
            os.close(fd)


def open_pipes() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ends of five new pipes, in the order of `Process`: ours and the process's."""
    stdin, stdout, stderr, requests, results = (os.pipe() for _ in range(5))
    ours = (stdin[1], stdout[0], stderr[0], requests[1], results[0])
    return ours, (stdin[0], stdout[1], stderr[1], requests[0], results[1])


def kernel_limits(limits: dict[str, int], mapped_bytes: int | None = None) -> list[tuple[int, int]]:
    """Return what the kernel limits in a process: memory above the `mapped_bytes` that it has without code.

    None: what this process has; where /proc does not tell, its memory has no limit.
    """
    if mapped_bytes is None:
        with suppress(OSError):
            mapped_bytes = mapped_now()
    most = [
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ]
    return most if mapped_bytes is None else [*most, (resource.RLIMIT_AS, mapped_bytes + (limits["memory_mb"] << 20))]


def mapped_now() -> int:
    """Return the size of this process's address space."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _add(sizes: dict[tuple[int, int], int], found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512


def _after(text: bytes, key: bytes) -> bytes:
    """Return the rest of the line that begins with a key."""
    return next((line[len(key) :].strip() for line in text.splitlines() if line.startswith(key)), b"")


def _read(proc: int, name: str) -> bytes:
    with suppress(OSError), open(os.open(name, os.O_RDONLY, dir_fd=proc), "rb") as file:
        return file.read()
    return b""
