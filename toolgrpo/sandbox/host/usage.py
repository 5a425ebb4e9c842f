"""What a confined process uses that no limit of the kernel bounds: threads, and files that have
lost their names.

Read from /proc, through a descriptor that the client has opened: a worker in a pid namespace of its
own still sees there the process that a pidfd names. Where /proc does not tell (root in a container
may not look at other users' processes), what it does not tell counts nothing.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

_UNLINKED = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+) (\d+) +/(?!dev/zero |SYSV).* \(deleted\)$", re.MULTILINE)


def threads(proc: int, pidfd: int) -> int:
    """Return how many threads a process has; 0 where it has ended or cannot be seen."""
    status = _read(proc, f"{_pid(proc, pidfd)}/status")
    return int(_after(status, b"Threads:") or 0)


def unlinked_bytes(proc: int, pidfd: int, most_each: int) -> int:
    """Return the size of the files that a process holds and that no folder names any more.

    It holds them open or mapped. A mapped one whose size only root could see counts `most_each`,
    the most that a file may have.
    """
    pid = _pid(proc, pidfd)
    sizes: dict[tuple[int, int], int] = {}
    with suppress(OSError):
        folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            for name in os.listdir(folder):
                with suppress(OSError):  # closed meanwhile
                    _add(sizes, os.stat(name, dir_fd=folder))
        finally:
            os.close(folder)
    for span, device, inode in _UNLINKED.findall(_read(proc, f"{pid}/maps")):
        try:
            _add(sizes, os.stat(f"{pid}/map_files/{span.decode()}", dir_fd=proc))
        except OSError:
            major, minor = device.split(b":")
            sizes.setdefault((os.makedev(int(major, 16), int(minor, 16)), int(inode)), most_each)
    return sum(sizes.values())


def _add(sizes: dict[tuple[int, int], int], found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512


def _pid(proc: int, pidfd: int) -> int:
    """Return the number that a process has in this /proc; -1 where it has none."""
    return int(_after(_read(proc, f"self/fdinfo/{pidfd}"), b"Pid:") or -1)


def _after(text: bytes, key: bytes) -> bytes:
    """Return the rest of the line that begins with a key."""
    return next((line[len(key) :].strip() for line in text.splitlines() if line.startswith(key)), b"")


def _read(proc: int, name: str) -> bytes:
    with suppress(OSError), open(os.open(name, os.O_RDONLY, dir_fd=proc), "rb") as file:
        return file.read()
    return b""
