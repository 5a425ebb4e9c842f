"""The terminal: a console that never hides the cursor; warnings, and what a user's files print, as lines on it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console

_LONGEST = 2000  # characters of what is printed at a time
LOGGERS = [logging.getLogger(name) for name in ("toolgrpo", "confined_python")]  # ours, and the sandbox's


class SteadyConsole(Console):
    """Rich's console, with a cursor that is always shown.

    A live bar hides it and shows it again when it stops. A process that is killed meanwhile (a
    second Ctrl-C, a crash in native code) cannot, and leaves a terminal without a cursor.
    In a pipe no line ends in spaces.
    """

    def print(self, *objects: Any, **how: Any) -> None:
        if self.is_terminal:
            super().print(*objects, **how)
            return
        with self.capture() as shown:
            super().print(*objects, **how)
        self.file.write(re.sub(" +$", "", shown.get(), flags=re.MULTILINE))
        self.file.flush()

    @property
    def is_terminal(self) -> bool:
        """Return whether its file is one. FORCE_COLOR says so of the pipes of a Jupyter kernel, which would show each frame of a bar."""
        return super().is_terminal and self.file.isatty()

    def show_cursor(self, show: bool = True) -> bool:
        return False


def show_warnings(say: Callable[[str], None]) -> logging.Handler:
    """Pass this package's warnings to `say` from now on, and to no other `say`; return the handler that does it."""
    shown = _ShownWarnings(say)
    for logger in LOGGERS:
        for handler in [one for one in logger.handlers if isinstance(one, _ShownWarnings)]:
            logger.removeHandler(handler)
        logger.addHandler(shown)
    return shown


def show_tool_output(say: Callable[[str], None]) -> None:
    """Pass the first lines that tools and agents print to `say`, too."""
    logger = logging.getLogger("toolgrpo.tools.output")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [WarningLines(say, logging.INFO)]


def are_shown(logger: logging.Logger) -> bool:
    """Return whether somebody set up logging, whose handlers show warnings: then they are not shown a second time."""
    return any(not isinstance(one, WarningLines) for name in (logger, logger.root) for one in name.handlers)


class FewLines:
    """Shows the first lines of what a user's files print, and then one that says where all of it is."""

    def __init__(self, show: Callable[[str], None], rest: Callable[[], str], most: int = 5) -> None:
        self._show, self._rest, self._left, self._half = show, rest, most, ""

    def __call__(self, text: str) -> None:
        *lines, half = (self._half + text).split("\n")
        self._half = half[:_LONGEST]
        for line in lines if self._left >= 0 else ():
            if self._left >= 0:
                self._show(
                    line[:_LONGEST] if self._left else f"(what your files print from here on is in {self._rest()})"
                )
            self._left -= 1

    def whole(self, text: str) -> None:
        self._show(text.rstrip("\n"))


class WarningLines(logging.Handler):
    """Pass the text of each warning to `say`, whose failure ends no run."""

    def __init__(self, say: Callable[[str], None], level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.getMessage())
        except Exception:  # a line that cannot be shown or written
            self.handleError(record)


class _ShownWarnings(WarningLines):
    """The one handler by which a person sees the warnings."""
