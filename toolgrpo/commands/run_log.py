"""The log of a command:
where the standard output and error of this process go, C++ libraries included.

Invariants: writing to it raises nothing, whatever the disk does; it never takes much more than
twice its limit, because at the limit the file is set aside as `NAME.log.1`, in place of the one
that was set aside before, and a new one is begun. So the end of a run is always in it.

Not covered: what is written within one second goes beyond the limit; other programs that were
started with this output go on writing to the file that they got.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

from toolgrpo.commands.streams import unfailing_stream, write_all
from toolgrpo.storage import open_own

_LIMIT_BYTES = 64 << 20
_LOOK_EVERY_S = 1.0


class RunLog:
    """One log file; `path` changes when it moves."""

    def __init__(self, path: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit_bytes
        self._moving = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_own(path)

    def take_standard_output(self) -> None:
        """Let everything that this process prints from now on go to the log,
        and keep the log within its limit.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, full, or None
                stream.flush()
        for number in (1, 2):
            os.dup2(self._descriptor, number)
        # On a descriptor of their own: a plugin that closes 1 and 2 gets these numbers for the
        # files it opens next.
        streams = unfailing_stream(self._descriptor, "utf-8"), unfailing_stream(self._descriptor, "utf-8")
        sys.stdout, sys.stderr = streams
        atexit.register(_put_back, *streams)
        threading.Thread(target=self._watch, name="log limit", daemon=True).start()

    def write(self, text: str) -> bool:
        """Append `text`; False if the disk did not take it."""
        return write_all(self._descriptor, text.encode("utf-8", "backslashreplace"))

    def move(self, path: Path, *, append: bool = False) -> None:
        """Go on in another file, with what was logged so far at its head; `append`: after what is
        in it.

        Raises OSError if it cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._moving:
            so_far = self.path
            taken = self._go_on_in(path, head=so_far.read_bytes(), append=append)
            self.path = path
            with contextlib.suppress(OSError):
                if not append:
                    _set_aside(path).unlink(missing_ok=True)  # of a run before
                if taken:
                    so_far.unlink()

    def keep_within_limit(self) -> None:
        """Begin a new file if this one has reached its limit."""
        with self._moving, contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size < self._limit or not self.path.is_file():
                return
            aside = _set_aside(self.path)
            self.path.replace(aside)
            said = f"[the log reached {self._limit} bytes; what was before is in {aside.name}]\n"
            self._go_on_in(self.path, head=said.encode())

    def _go_on_in(self, path: Path, head: bytes, *, append: bool = False) -> bool:
        opened = open_own(path)
        if not append:
            os.ftruncate(opened, 0)
        taken = write_all(opened, head)
        # A plugin may have closed 1 or 2, and another file may have the number now.
        still_ours = [number for number in (1, 2) if _same_file(number, self._descriptor)]
        for number in (self._descriptor, *still_ours):
            os.dup2(opened, number, inheritable=number in still_ours)
        os.close(opened)
        return taken

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(_LOOK_EVERY_S):
            self.keep_within_limit()


def _put_back(stdout: TextIO, stderr: TextIO) -> None:
    """Put the streams back: Python flushes both at its end, and exits with 120 if it cannot."""
    sys.stdout, sys.stderr = stdout, stderr


def _set_aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
