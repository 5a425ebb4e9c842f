"""Write the output of tools to a file of bounded size; its first lines are logged at level INFO, for a terminal.

Equal ones are logged once: each worker imports the tools, and prints what they print then.

One pipe carries the stdout and stderr of the supervisor, its workers and their children. It is
always drained, so that a tool that prints without end blocks nobody; what is over the limit is
dropped, with one notice.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from toolgrpo.support.plain_text import plain
from toolgrpo.support.storage import opened_to_append

_logger = logging.getLogger("toolgrpo.tools.output")
_CHUNK = 1 << 18
_TAIL = 4000
_FIRST, _LONGEST = 5, 500  # lines that are logged, and their characters
_LOOKED_AT = 1000  # pieces of output


class OutputLog:
    """Drains one pipe. Without a path the text goes to the logger `toolgrpo.tools.output`, at level
    DEBUG.
    """

    def __init__(self, path: Path | None, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._left = max_bytes
        self._buffer = bytearray(_CHUNK)
        self._tail = b""
        self._file: int | None = None
        self._path, self._in_traceback = path, False
        self._looked, self._lines = 0, set[str]()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = opened_to_append(path)

    @property
    def tail(self) -> str:
        """The last that was printed, for error messages."""
        return self._tail.decode("utf-8", "replace").strip()

    def drain(self, descriptor: int) -> bool:
        """Take what there is; False at the end of the pipe."""
        try:
            count = os.readv(descriptor, [self._buffer])
        except BlockingIOError:
            return True
        if count == 0:
            return False
        self.record(memoryview(self._buffer)[:count])
        return True

    def record(self, text: bytes | memoryview) -> None:
        """Write what was printed, as far as the limit goes."""
        self._tail = (self._tail + bytes(text[-_TAIL:]))[-_TAIL:]
        if self._file is not None and len(self._lines) <= _FIRST and self._looked < _LOOKED_AT:
            self._looked += 1
            self._log_first(bytes(text[:_CHUNK]).decode("utf-8", "replace"))
        if self._left > 0:
            self._write(bytes(text[: self._left]))
            self._left -= len(text)
            if self._left <= 0:
                self._write(b"\n[the limit of this log is reached; what tools print from here on is dropped]\n")

    def _log_first(self, text: str) -> None:
        """Log the first lines that tools print themselves: the tracebacks of calls are in the file alone."""
        for line in text.splitlines():
            was_in = self._in_traceback  # which ends with the line of the error, at the margin
            self._in_traceback = line.startswith("Traceback ") or (was_in and line.startswith(" "))
            if was_in or self._in_traceback or not line.strip() or line in self._lines or len(self._lines) > _FIRST:
                continue
            shown = f"(what they print from here on is in {self._path})"
            if len(self._lines) < _FIRST:
                shown = plain(line[:_LONGEST])
            self._lines.add(line)
            _logger.info("%s", shown)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, printed: bytes) -> None:
        text = plain(printed.decode("utf-8", "replace"))
        if self._file is not None:
            with suppress(OSError):  # a full disk must not end the run for a log
                os.write(self._file, text.encode())
        else:
            _logger.debug("%s", text.rstrip("\n"))
