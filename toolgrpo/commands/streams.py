"""Text streams on which nothing raises: a full disk,
a closed terminal or a plugin that closes them ends no run.

What cannot be written is dropped. Nothing is buffered, so that a signal handler may write too and a
killed process loses nothing that it wrote; characters that the encoding has not are written as
escapes.
"""

from __future__ import annotations

import io
import locale
import os
import select
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_WAIT_S = 1.0  # for a terminal that takes nothing at the moment


def unfailing_stream(descriptor: int, encoding: str | None = None) -> TextIO:
    """Return a stream over `descriptor`, which it does not own: closing it has no effect."""
    return _Stream(
        _Descriptor(descriptor),  # type: ignore[arg-type]  # as `python -u` does: raw, without a buffer
        encoding=encoding or locale.getpreferredencoding(False),
        errors="backslashreplace",
        newline="\n",
        write_through=True,
    )


def write_all(descriptor: int, content: bytes | memoryview) -> bool:
    """Write everything; False if the system did not take it."""
    view = memoryview(content)
    try:
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], _WAIT_S)[1]:
                    return False
    except OSError:
        return False
    return True


class _Descriptor(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, content: ReadableBuffer, /) -> int:
        with memoryview(content) as view:
            write_all(self._descriptor, view.cast("B"))
            return view.nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def close(self) -> None:
        """Stay open, for those who write later."""


class _Stream(io.TextIOWrapper):
    def close(self) -> None:
        """Stay open, for those who write later."""

    def detach(self) -> io.BufferedIOBase:  # type: ignore[override]
        """Give the raw stream away and stay attached to it."""
        return self.buffer  # type: ignore[return-value]
